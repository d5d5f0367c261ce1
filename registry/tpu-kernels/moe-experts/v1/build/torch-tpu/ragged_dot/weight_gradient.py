"""The weight gradient of a grouped matmul: the rows of two matrices multiplied over the rows of each group.

Axis letters as in `forward`, and: P passes. The kernel makes ``out[g] = lhs[rows of g]^T grad[rows of g]``::

    for each group g, and each part of [K, N] whose sums fit into vector memory:
        for each chunk of the group's rows:            the next chunks of lhs and grad are on their way meanwhile
            rows of other groups in its first and last row tile are zeroed in place
            for each piece of the part's K: product; the last chunk's goes out, rounded, the others' are summed in f32

A group without rows has one chunk without rows, so zeros go out. The columns may be
made in shares, by a chip's cores together.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .common import RowCopies, advance, aligned, each_part, product, share_columns, with_height
from .tiles import LANES, WeightConfig, row_tile


def _kernel(
    sizes: Any,
    offset: Any,
    lhs: Any,
    grad: Any,
    out: Any,
    first: Any,
    last: Any,
    going_out: Any,
    x: Any,
    y: Any,
    sums: Any,
    staged: Any,
    x_flags: Any,
    y_flags: Any,
    out_flags: Any,
    *,
    config: WeightConfig,
) -> None:
    grad, out = share_columns(grad, config.shares), share_columns(out, config.shares)
    m = lhs.shape[0]
    groups, k, n = out.shape
    tile = row_tile(lhs.dtype)
    chunk, piece, buffers = config.rows, config.piece, config.buffers
    deep, wide = config.depth, config.columns  # of one pass
    passes_k, passes_n = k // deep, pl.cdiv(n, wide)
    passes = passes_k * passes_n
    heights = [*range(config.height, chunk, config.height), chunk]

    before = jax.lax.fori_loop(0, offset[0], lambda i, at: at + jnp.maximum(sizes[i], 0), jnp.int32(0))

    def bounds(index: Any, start: Any) -> Any:
        # Sizes are data: whatever they hold, no index may leave the arrays.
        first[index] = start
        end = jnp.minimum(start + jnp.maximum(sizes[offset[0] + index], 0), m)
        last[index] = end
        return end

    jax.lax.fori_loop(0, groups, bounds, jnp.minimum(before, m))
    for slot in range(config.stages):
        going_out[slot] = 0

    def columns_of(visit: Any) -> tuple[Any, Any]:
        """First row of `out` and first column of a pass."""
        which = jax.lax.rem(visit, passes)
        return (which // passes_n) * deep, jax.lax.rem(which, passes_n) * wide

    def copies(visit: Any) -> list[RowCopies]:
        at_k, at_n = columns_of(visit)
        left = lhs if passes_k == 1 else lhs.at[:, pl.ds(pl.multiple_of(at_k, LANES), deep)]
        right = grad if passes_n == 1 else grad.at[:, pl.ds(pl.multiple_of(at_n, LANES), wide)]
        return [
            RowCopies(left, x, x_flags, inwards=True, tile=tile),
            RowCopies(right, y, y_flags, inwards=True, tile=tile),
        ]

    def group_of(visit: Any) -> Any:
        return visit // passes if passes > 1 else visit

    def count_rows(group: Any, base: Any) -> Any:
        """Rows of the chunk that starts at `base`, in whole row tiles."""
        return jnp.clip(aligned(last[group] + tile - 1, tile) - base, 0, chunk)

    # A cursor (visit, first row of the chunk) runs ahead of the use of rows.
    def fetch(visit: Any, base: Any, buffer: Any) -> tuple[Any, Any]:
        there = visit < groups * passes
        group = group_of(jnp.minimum(visit, groups * passes - 1))

        @pl.when(there)
        def _() -> None:
            for rows in copies(visit):
                rows.start(buffer, base, count_rows(group, base))

        more = base + chunk < last[group]
        following = jnp.where(more, visit, visit + 1)
        next_group = group_of(jnp.minimum(following, groups * passes - 1))
        return following, jnp.where(more, base + chunk, aligned(first[next_group], tile))

    ahead = (jnp.int32(0), aligned(first[0], tile))
    ahead = jax.lax.fori_loop(0, buffers - 1, lambda buffer, at: fetch(*at, buffer), ahead)

    def out_copy(group: Any, at_k: Any, length: int, at_n: Any, slot: Any) -> Any:
        columns = slice(None) if passes_n == 1 else pl.ds(pl.multiple_of(at_n, LANES), wide)
        place = out.at[group, pl.ds(pl.multiple_of(at_k, tile), length), columns]
        return pltpu.make_async_copy(staged.at[slot, pl.ds(0, length)], place, out_flags.at[slot])

    def wait_for(slot: Any) -> None:
        """Waits until what was in a slot has gone out."""
        for length in {piece, deep % piece} - {0}:
            pl.when(going_out[slot] == length)(lambda length=length: out_copy(0, 0, length, 0, slot).wait())

    def clean(ref: Any, buffer: Any, base: Any, start: Any, end: Any, need: Any, height: Any) -> None:
        """Zeroes the rows of other groups, and what an earlier chunk left in the rows up to `height`."""

        def keep(at: Any) -> None:
            row = base + at + jax.lax.broadcasted_iota(jnp.int32, (tile, ref.shape[-1]), 0)
            where = (buffer, pl.ds(pl.multiple_of(at, tile), tile))
            ref[where] = jnp.where((row >= start) & (row < end), ref[where], jnp.zeros_like(ref[where]))

        pl.when(start > base)(lambda: keep(0))
        pl.when((need > 0) & (end < base + need))(lambda: keep(need - tile))

        def zero(i: Any, _: Any) -> Any:
            ref[buffer, pl.ds(pl.multiple_of(need + i * tile, tile), tile)] = jnp.zeros(
                (tile, ref.shape[-1]), ref.dtype
            )
            return 0

        jax.lax.fori_loop(0, (height - need) // tile, zero, 0)

    def run_visit(visit: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        group = group_of(visit)
        at_k, at_n = columns_of(visit) if passes > 1 else (0, 0)
        start, end = first[group], last[group]
        origin = aligned(start, tile)
        chunks = jnp.maximum((end - origin + chunk - 1) // chunk, 1)

        def run_chunk(index: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
            buffer, slot, *ahead = state
            base = pl.multiple_of(origin + index * chunk, tile)
            need = count_rows(group, base)
            height = jnp.minimum(
                jnp.maximum((need + config.height - 1) // config.height, 1) * config.height, chunk
            )
            for rows in copies(visit):
                rows.wait(buffer, need)
            ahead = fetch(*ahead, jnp.where(buffer == 0, buffers - 1, buffer - 1))
            clean(x, buffer, base, start, end, need, height)
            clean(y, buffer, base, start, end, need, height)
            final = index == chunks - 1

            def run_piece(number: Any, length: int, slot: Any) -> Any:
                at = pl.multiple_of(number * piece, LANES) if length < deep else 0
                rows = pl.ds(at, length) if length < deep else slice(None)
                pl.when(final)(lambda: wait_for(slot))

                def multiply(height: int) -> None:
                    values = product(x[buffer, :height, rows], y[buffer, :height], (0, 0))
                    values += jnp.where(index == 0, jnp.zeros_like(values), sums[rows])

                    @pl.when(final)
                    def _() -> None:
                        staged[slot, :length] = values.astype(staged.dtype)

                    @pl.when(~final)
                    def _() -> None:
                        sums[rows] = values

                with_height(need, heights, multiply)

                @pl.when(final)
                def _() -> None:
                    going_out[slot] = length
                    out_copy(group, at_k + at, length, at_n, slot).start()

                return jnp.where(final, advance(slot, config.stages), slot)

            slot = each_part(deep, piece, run_piece, slot)
            return advance(buffer, buffers), slot, *ahead

        return jax.lax.fori_loop(0, chunks, run_chunk, state)

    zero = jnp.int32(0)
    jax.lax.fori_loop(0, groups * passes, run_visit, (zero, zero, *ahead))
    for slot in range(config.stages):
        wait_for(slot)


@functools.partial(jax.jit, static_argnames=("groups", "out_dtype", "config", "interpret"))
def gmm_weights(
    lhs: jax.Array,
    grad: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    *,
    groups: int,
    out_dtype: Any,
    config: WeightConfig,
    interpret: Any,
) -> jax.Array:
    """For each group, the product of its rows of `lhs` [M, K] and `grad` [M, N] over the rows.

    M is a multiple of the row tile.

    Returns: [groups, K, N] in `out_dtype`; zeros for a group without rows.
    """
    m, k = lhs.shape
    n = grad.shape[1]
    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    columns = min(config.columns, n // config.shares)
    moved = (
        sum(a.size * a.dtype.itemsize for a in (lhs, grad)) + groups * k * n * jnp.dtype(out_dtype).itemsize
    )
    return pl.pallas_call(
        functools.partial(_kernel, config=config),
        name="ragged_dot_weights",
        out_shape=jax.ShapeDtypeStruct((groups, k, n), out_dtype),
        grid=(config.shares,),
        in_specs=[smem, smem, hbm, hbm],
        out_specs=hbm,
        scratch_shapes=[
            *[pltpu.SMEM((groups,), jnp.int32)] * 2,
            pltpu.SMEM((config.stages,), jnp.int32),
            pltpu.VMEM((config.buffers, config.rows, config.depth), lhs.dtype),
            pltpu.VMEM((config.buffers, config.rows, columns), grad.dtype),
            pltpu.VMEM((config.depth, columns), jnp.float32),
            pltpu.VMEM((config.stages, config.piece, columns), out_dtype),
            pltpu.SemaphoreType.DMA((config.buffers,)),
            pltpu.SemaphoreType.DMA((config.buffers,)),
            pltpu.SemaphoreType.DMA((config.stages,)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=config.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(flops=2 * m * k * n, bytes_accessed=moved, transcendentals=0),
        interpret=interpret,
    )(group_sizes, group_offset, lhs, grad)
