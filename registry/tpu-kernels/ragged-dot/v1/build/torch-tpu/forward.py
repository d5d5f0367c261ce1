"""Grouped matmul on TPUs in Pallas: rows sorted by group, one weight matrix a group.

Axis letters::

    M  rows of lhs and of the result     S  number of group sizes
    K  contraction                       G  groups whose weights are here (G <= S)
    N  columns of the weights            V  visits

All copies between HBM and vector memory are the kernel's own::

    sizes [S] ── scalar loop ──> visits: (group, first row, last row)               in SMEM
    ring of weight pieces: filled before the first product, each slot refilled as soon as it is used
    for each visit v:                                                    one group's rows, in order
        for each chunk of rows:                    lhs of the next chunks is on its way meanwhile
            for each piece of the group's weights: wait for it, multiply, epilogue, refill its slot
            row tiles that are complete go out; the one that the next group shares is carried on

So a group's weights are read once a visit, whatever the tiles, and never if it has no rows; rows are read and
written once, within the groups' own bounds. A *piece* is some columns of a group's weights, in either stored
layout, `[G, K, N]` or `[G, N, K]` (and a part of K where all of it does not fit; then sums are kept in f32); of
quantised weights, with their scales, and made floats as they are multiplied. A visit is a whole group where the ring
holds all its pieces, so that several chunks share them; else a chunk is a visit.

Few rows (`resident`): all of lhs and of the result stay in vector memory, and chunks are slices of them.

The columns may be made in shares, each from all rows: by a chip's cores together, or one after the other where
rows cost less to read again than weights.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .common import RowCopies, advance, aligned, each_part, product, share_columns, with_height
from .epilogue import Epilogue
from .quantised import COLUMNS, PER_WORD, int8_product, is_mxfp4, mxfp4_product, terms_of
from .tiles import LANES, SUBLANES, Config, heights, round_up, row_tile

PLAIN = Epilogue()


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """How the weights of a group are cut, and where each piece lies.

    `whole` pieces of `columns` columns of the result, then one of `rest`; each in `parts` parts of K, in order. The
    share of the result that is made here has `n` columns, from `first` on.
    Quantised weights have `scales`, their ring, and for MXFP4 the `terms` that its products use.
    """

    k: int
    n: int
    first: Any
    weights: Any
    ring: Any
    semaphores: Any
    config: Config
    epilogue: Epilogue
    transposed: bool
    scales: Any = None
    scale_ring: Any = None
    terms: Any = None
    interpreted: bool = False

    @property
    def columns(self) -> int:
        return min(self.config.columns, self.n)

    @property
    def whole(self) -> int:
        return self.n // self.columns

    @property
    def rest(self) -> int:
        return self.n % self.columns

    @property
    def parts(self) -> int:
        return self.k // self.config.depth

    @property
    def count(self) -> int:
        return (self.whole + (self.rest > 0)) * self.parts

    def block(self, slot: Any, branch: int, columns: int) -> Any:
        """The weights in a slot."""
        wide = pl.ds(0, columns * self.epilogue.columns)
        return self.ring.at[(slot, branch, wide) if self.transposed else (slot, branch, slice(None), wide)]

    def product(self, rows: jax.Array, slot: Any, branch: int, columns: int) -> jax.Array:
        """Rows times the weights in a slot, f32."""
        block = self.block(slot, branch, columns)
        if self.scales is None:
            return product(rows, block[...], (1, int(self.transposed)))
        wide = pl.ds(0, columns * self.epilogue.columns)
        scale = self.scale_ring.at[slot, branch, :, wide]
        if self.terms is not None:
            return mxfp4_product(rows, block, scale, self.terms, interpreted=self.interpreted)
        return int8_product(rows, block[...], scale[...], int(self.transposed))

    def _copies(self, group: Any, index: Any, columns: int, part: Any, slot: Any) -> list[Any]:
        deep = slice(None)
        if self.parts > 1:
            aligned_to = LANES if self.transposed else row_tile(self.ring.dtype)
            deep = pl.ds(pl.multiple_of(part * self.config.depth, aligned_to), self.config.depth)
        step = 1 if self.transposed else LANES
        copies = []
        all_columns = self.weights.shape[1 if self.transposed else 2] // self.epilogue.branches
        for branch in range(self.epilogue.branches):
            first = branch * all_columns + (self.first + index * self.columns) * self.epilogue.columns
            if not isinstance(first, int):
                first = pl.multiple_of(first, max(step, row_tile(self.ring.dtype)))
            wide = pl.ds(first, columns * self.epilogue.columns)
            source = self.weights.at[(group, wide, deep) if self.transposed else (group, deep, wide)]
            block = self.block(slot, branch, columns)
            copies.append(pltpu.make_async_copy(source, block, self.semaphores.at[slot]))
            if self.scales is not None:
                copies.append(self._scale_copy(group, branch, index, columns, slot))
        return copies

    def _scale_copy(self, group: Any, branch: int, index: Any, columns: int, slot: Any) -> Any:
        # The scales of transposed weights have columns on lanes where these have them on sublanes.
        step = LANES if self.transposed else 1
        all_columns = self.scales.shape[2] // self.epilogue.branches
        first = branch * all_columns + (self.first + index * self.columns) * self.epilogue.columns
        if not isinstance(first, int):
            first = pl.multiple_of(first, LANES)
        size = round_up(columns * self.epilogue.columns, step)
        source = self.scales.at[group, :, pl.ds(first, size)]
        ring = self.scale_ring.at[slot, branch, :, pl.ds(0, size)]
        return pltpu.make_async_copy(source, ring, self.semaphores.at[slot])

    def start(self, group: Any, piece: Any, slot: Any) -> None:
        """Starts to fetch a piece by its number."""
        index, part = (piece // self.parts, jax.lax.rem(piece, self.parts)) if self.parts > 1 else (piece, 0)

        def fetch(columns: int) -> None:
            for copy in self._copies(group, index, columns, part, slot):
                copy.start()

        if not self.rest:
            fetch(self.columns)
            return
        pl.when(index < self.whole)(lambda: fetch(self.columns))
        pl.when(index == self.whole)(lambda: fetch(self.rest))

    def wait(self, columns: int, slot: Any) -> None:
        """Waits for what was fetched into a slot, a piece of `columns` columns."""
        for copy in self._copies(0, 0, columns, 0, slot):
            copy.wait()


def _list_visits(
    sizes: Any,
    offset: Any,
    group: Any,
    first: Any,
    last: Any,
    *,
    rows: int,
    groups: int,
    step: int,
    tile: int,
) -> jax.Array:
    """Writes the visits into SMEM; returns their number.

    Args:
      sizes: SMEM ref [S], int32.
      offset: first group whose weights are here.
      group, first, last: SMEM refs [V]: the group, and its rows `[first, last)`.
      rows: M.
      step: most rows of a visit, counted from a multiple of `tile`; 0 for all rows of the group.
    """

    def add(at: Any, g: Any, low: Any, high: Any) -> Any:
        # The entry stays where there are rows; else the next one takes its place.
        group[at], first[at], last[at] = g, low, high
        return at + (high > low).astype(jnp.int32)

    def visit(index: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        start, at = carry
        # Sizes are data: whatever they hold, no index may leave the arrays.
        end = jnp.minimum(start + jnp.maximum(sizes[offset + index], 0), rows)
        if not step:
            return end, add(at, index, start, end)
        base = aligned(start, tile)

        def part(i: Any, a: Any) -> Any:
            low = base + i * step
            return add(a, index, jnp.maximum(start, low), jnp.minimum(end, low + step))

        return end, jax.lax.fori_loop(0, jnp.where(end > start, (end - base + step - 1) // step, 0), part, at)

    before = jax.lax.fori_loop(0, offset, lambda i, at: at + jnp.maximum(sizes[i], 0), jnp.int32(0))
    return jax.lax.fori_loop(0, groups, visit, (jnp.minimum(before, rows), jnp.int32(0)))[1]


def _row(ref: Any, row: Any, lanes: Any) -> jax.Array:
    """One row [1, lanes] of an f32 ref whose rows are a multiple of 8: not every TPU loads from any row on."""
    rows = ref[pl.ds(pl.multiple_of(aligned(row, SUBLANES), SUBLANES), SUBLANES), lanes]
    mine = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0) == jax.lax.rem(row, SUBLANES)
    return jnp.sum(jnp.where(mine, rows, 0), axis=0, keepdims=True)


def _kernel(
    sizes: Any,
    offset: Any,
    lhs: Any,
    weights: Any,
    *refs: Any,
    config: Config,
    epilogue: Epilogue,
    transpose_rhs: bool,
    quantised: bool,
    interpreted: bool,
) -> None:
    scales, refs = (refs[0], refs[1:]) if quantised else (None, refs)
    biases, refs = refs[: epilogue.branches * epilogue.bias], refs[epilogue.branches * epilogue.bias :]
    out, group, first, last, going_out, ring, x, y, carry, sums, ring_flags, x_flags, y_flags, *refs = refs
    scale_ring, terms = (*refs, None, None)[:2]
    out, *biases = (share_columns(ref, config.shares) for ref in (out, *biases))
    m, k = lhs.shape
    tile = row_tile(lhs.dtype)
    chunk, slots, buffers, resident = config.rows, config.slots, config.buffers, config.resident
    n = out.shape[1]
    pieces = _Pieces(
        k,
        n,
        pl.program_id(0) * n if config.shares > 1 else 0,
        weights,
        ring,
        ring_flags,
        config,
        epilogue,
        transpose_rhs,
        scales,
        scale_ring,
        terms,
        interpreted,
    )
    if resident:
        all_rows = pltpu.make_async_copy(lhs, x.at[0, pl.ds(0, m)], x_flags.at[0])
        all_rows.start()
    else:
        rows_in = RowCopies(lhs, x, x_flags, inwards=True, tile=tile)
        rows_out = RowCopies(out, y, y_flags, inwards=False, tile=tile)
    visits = _list_visits(
        sizes,
        offset[0],
        group,
        first,
        last,
        rows=m,
        groups=weights.shape[0],
        step=0 if config.by_group else chunk,
        tile=tile,
    )

    # Two cursors run ahead of the products: over the pieces of weights, and over the chunks of rows.
    def fetch_piece(visit: Any, piece: Any, slot: Any) -> tuple[Any, Any]:
        pl.when(visit < visits)(lambda: pieces.start(group[visit], piece, slot))
        ends = piece + 1 == pieces.count
        return jnp.where(ends, visit + 1, visit), jnp.where(ends, 0, piece + 1)

    def count_rows(visit: Any, base: Any) -> Any:
        """Rows of the chunk that starts at `base`, in whole row tiles."""
        return jnp.minimum(aligned(last[visit] + tile - 1, tile) - base, chunk)

    def fetch_rows(visit: Any, base: Any, buffer: Any) -> tuple[Any, Any]:
        there = visit < visits
        pl.when(there)(lambda: rows_in.start(buffer, base, count_rows(visit, base)))
        more = base + chunk < last[visit]
        following = jnp.where(more | ~there, visit, visit + 1)
        return following, jnp.where(more, base + chunk, aligned(first[following], tile))

    zero = jnp.int32(0)
    rows_ahead: tuple[Any, ...] = ()
    if not resident:
        rows_ahead = fetch_rows(zero, aligned(first[0], tile), 0)
    piece_ahead = jax.lax.fori_loop(0, slots, lambda slot, at: fetch_piece(*at, slot), (zero, zero))
    if resident:
        y[...] = jnp.zeros_like(y)
        all_rows.wait()
    else:
        carry[...] = jnp.zeros_like(carry)
        for buffer in range(buffers):
            going_out[buffer] = 0
        rows_ahead = jax.lax.fori_loop(1, buffers - 1, lambda buffer, at: fetch_rows(*at, buffer), rows_ahead)

    def store(
        buffer: Any, base: Any, start: Any, end: Any, height: int, lanes: Any, values: jax.Array
    ) -> None:
        """Puts the rows `[start, end)` of a chunk into the result, and leaves those of other groups."""
        row = base + jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)
        mine = (row >= start) & (row < end)
        if resident:
            at = (0, pl.ds(base, height), lanes)
            y[at] = jnp.where(mine, values, y[at])
            return
        y[buffer, :height, lanes] = jnp.where(mine, values, jnp.zeros_like(values))

        @pl.when(start > base)
        def _() -> None:
            at = (buffer, pl.ds(0, tile), lanes)
            row = base + jax.lax.broadcasted_iota(jnp.int32, (tile, values.shape[1]), 0)
            y[at] = jnp.where(row < start, carry[:, lanes], y[at])

    def run_chunk(
        visit: Any, origin: Any, chunks: Any, index: Any, state: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        slot, buffer, ahead_visit, ahead_piece, *rows_ahead = state
        g, start, end = group[visit], first[visit], last[visit]
        base = pl.multiple_of(origin + index * chunk, tile)
        final = index == chunks - 1
        need = count_rows(visit, base)
        if not resident:
            rows_in.wait(buffer, need)
            rows_ahead = fetch_rows(*rows_ahead, jnp.where(buffer == 0, buffers - 1, buffer - 1))
            # The buffer of the result is free when what was in it has gone out.
            rows_out.wait(buffer, going_out[buffer])

        def run_piece(number: Any, columns: int, state: tuple[Any, ...]) -> tuple[Any, ...]:
            slot, ahead_visit, ahead_piece = state
            lanes = slice(None)
            if pieces.n > pieces.columns:
                lanes = pl.ds(pl.multiple_of(number * pieces.columns, LANES), columns)
            for part in range(pieces.parts):
                # Later chunks of the visit find the piece there.
                pl.when(index == 0)(functools.partial(pieces.wait, columns, slot))

                def multiply(height: int, part: int = part, slot: Any = slot) -> None:
                    rows = (0, pl.ds(base, height)) if resident else (buffer, pl.ds(0, height))
                    depth = config.depth
                    deep = slice(None) if pieces.parts == 1 else slice(part * depth, (part + 1) * depth)
                    products = [
                        pieces.product(x[(*rows, deep)], slot, branch, columns)
                        for branch in range(epilogue.branches)
                    ]
                    for branch, values in enumerate(products):
                        at = (branch, slice(0, height), slice(0, columns * epilogue.columns))
                        if part:
                            products[branch] = values + sums[at]
                        if part < pieces.parts - 1:
                            sums[at] = products[branch]
                    if part == pieces.parts - 1:
                        for branch, bias in enumerate(biases):
                            wide = (
                                lanes
                                if epilogue.columns == 1 or lanes == slice(None)
                                else pl.ds(pl.multiple_of(number * pieces.columns * 2, LANES), columns * 2)
                            )
                            products[branch] += _row(bias, g, wide)
                        store(buffer, base, start, end, height, lanes, epilogue.apply(products, y.dtype))

                with_height(need, heights(chunk, tile), multiply)

                # After the visit's last chunk the slot is free: for the piece that is `slots` further on.
                @pl.when(final)
                def _(visit: Any = ahead_visit, piece: Any = ahead_piece, slot: Any = slot) -> None:
                    fetch_piece(visit, piece, slot)

                ends = ahead_piece + 1 == pieces.count
                ahead_visit = jnp.where(final & ends, ahead_visit + 1, ahead_visit)
                ahead_piece = jnp.where(final, jnp.where(ends, 0, ahead_piece + 1), ahead_piece)
                slot = advance(slot, slots)
            return slot, ahead_visit, ahead_piece

        used, ahead_visit, ahead_piece = each_part(
            pieces.n, pieces.columns, run_piece, (slot, ahead_visit, ahead_piece)
        )
        if not resident:
            complete = jnp.minimum(base + chunk, aligned(end, tile))
            going_out[buffer] = jnp.maximum(complete - base, 0)
            rows_out.start(buffer, base, going_out[buffer])

            @pl.when(final & (end > complete))
            def _() -> None:
                carry[...] = y[buffer, pl.ds(pl.multiple_of(complete - base, tile), tile)]

        # The chunks of a visit use the same slots.
        return jnp.where(final, used, slot), advance(buffer, buffers), ahead_visit, ahead_piece, *rows_ahead

    def run_visit(visit: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        origin = aligned(first[visit], tile)
        chunks = (last[visit] - origin + chunk - 1) // chunk
        return jax.lax.fori_loop(0, chunks, functools.partial(run_chunk, visit, origin, chunks), state)

    jax.lax.fori_loop(0, visits, run_visit, (zero, zero, *piece_ahead, *rows_ahead))
    if resident:
        result = pltpu.make_async_copy(y.at[0, pl.ds(0, m)], out, y_flags.at[0])
        result.start()
        result.wait()
        return
    for buffer in range(buffers):
        rows_out.wait(buffer, going_out[buffer])

    def send(begin: Any, end: Any) -> None:
        """Writes the rows of buffer 0 over and over, from row `begin` to `end`."""

        def part(index: Any, _: Any) -> Any:
            at = begin + index * chunk
            count = jnp.minimum(end - at, chunk)
            rows_out.start(0, at, count)
            rows_out.wait(0, count)
            return 0

        jax.lax.fori_loop(0, (end - begin + chunk - 1) // chunk, part, 0)

    # The row tile that was carried to the end, and zeros where no group has rows.
    begin = jnp.where(visits > 0, aligned(first[0], tile), m)
    end = jnp.where(visits > 0, last[jnp.maximum(visits - 1, 0)], m)
    y[0, :tile] = carry[...]
    send(aligned(end, tile), aligned(end + tile - 1, tile))
    y[0] = jnp.zeros_like(y[0])
    send(zero, begin)
    send(aligned(end + tile - 1, tile), jnp.int32(m))


@functools.partial(jax.jit, static_argnames=("transpose_rhs", "out_dtype", "epilogue", "config", "interpret"))
def gmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    bias: jax.Array | None = None,
    scale: jax.Array | None = None,
    *,
    transpose_rhs: bool,
    out_dtype: Any,
    config: Config,
    epilogue: Epilogue = PLAIN,
    interpret: Any = False,
) -> jax.Array:
    """The grouped product, without a gradient of its own: see `functions.ragged_dot`.

    Args:
      lhs: [M, K]; M is a multiple of the row tile, or with `config.resident` of 8.
      rhs: [G, K, N], or [G, N, K] with `transpose_rhs`. Same dtype, int8, or as [G, K/8, N] MXFP4 words.
      group_sizes: [S] int32. group_offset: [1] int32, within 0..S-G.
      bias: [G, N], with `epilogue.bias`.
      scale: [G, B, N] f32 of int8 weights, or the exponents of MXFP4. `config.depth` is K
        then, unless B is 1.
    Returns: [M, N], or [M, N/2] with a gate, in `out_dtype`.
    """
    m, k = lhs.shape
    groups = rhs.shape[0]
    n = epilogue.narrow(rhs.shape[1 if transpose_rhs else 2])
    columns = min(config.columns, n // config.shares)
    wide = columns * epilogue.columns
    visits = groups + (0 if config.by_group else pl.cdiv(m, config.rows))
    mxfp4 = is_mxfp4(rhs)
    depth = config.depth // PER_WORD if mxfp4 else config.depth
    block = (wide, depth) if transpose_rhs else (depth, wide)
    rows = (1, m + config.rows) if config.resident else (config.buffers, config.rows)
    unused = (8, LANES)
    biases: list[jax.Array] = []
    if bias is not None:
        more = round_up(groups, SUBLANES) - groups
        padded = jnp.pad(bias.astype(jnp.float32), ((0, more), (0, 0)))
        biases = jnp.split(padded, epilogue.branches, axis=1)
    scales, held = [], []
    if scale is not None:
        scale_columns = wide
        if transpose_rhs:
            scale, scale_columns = _by_lanes(scale, epilogue.branches), round_up(wide, LANES)
        of_piece = (scale.shape[1], scale_columns)
        scales, held = [scale], [pltpu.VMEM((config.slots, epilogue.branches, *of_piece), scale.dtype)]
        held += [terms_of(scale.shape[1], min(scale_columns, COLUMNS))] * mxfp4
    if not interpret:
        # XLA may otherwise stage all weights in vector memory ahead of the call, needed or not.
        rhs, *scales = (pltpu.with_memory_space_constraint(w, pltpu.HBM) for w in (rhs, *scales))
    smem, vmem, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pltpu.VMEM, pl.ANY))
    moved = sum(a.size * a.dtype.itemsize for a in (lhs, rhs)) + m * n * jnp.dtype(out_dtype).itemsize
    return pl.pallas_call(
        functools.partial(
            _kernel,
            config=config,
            epilogue=epilogue,
            transpose_rhs=transpose_rhs,
            quantised=scale is not None,
            interpreted=interpret is not False,
        ),
        name="ragged_dot",
        out_shape=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(config.shares,),
        in_specs=[smem, smem, hbm, hbm, *[hbm] * len(scales), *[vmem] * len(biases)],
        out_specs=hbm,
        scratch_shapes=[
            *[pltpu.SMEM((visits + 1,), jnp.int32)] * 3,
            pltpu.SMEM((config.buffers,), jnp.int32),
            pltpu.VMEM((config.slots, epilogue.branches, *block), rhs.dtype),
            pltpu.VMEM((*rows, k), lhs.dtype),
            pltpu.VMEM((*rows, n // config.shares), out_dtype),
            pltpu.VMEM(unused if config.resident else (row_tile(lhs.dtype), n // config.shares), out_dtype),
            pltpu.VMEM(
                (epilogue.branches, config.rows, wide) if k > config.depth else (1, *unused), jnp.float32
            ),
            pltpu.SemaphoreType.DMA((config.slots,)),
            pltpu.SemaphoreType.DMA((config.buffers,)),
            pltpu.SemaphoreType.DMA((config.buffers,)),
            *held,
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=config.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * k * n * (epilogue.branches * epilogue.columns),
            bytes_accessed=moved,
            transcendentals=0,
        ),
        interpret=interpret,
    )(group_sizes, group_offset, lhs, rhs, *scales, *biases)


def _by_lanes(scale: jax.Array, branches: int) -> jax.Array:
    """Scales [G, B, N] with the columns of each branch padded to whole registers."""
    groups, blocks, n = scale.shape
    more = round_up(n // branches, LANES) - n // branches
    by_branch = jnp.pad(scale.reshape(groups, blocks, branches, -1), ((0, 0),) * 3 + ((0, more),))
    return by_branch.reshape(groups, blocks, -1)
