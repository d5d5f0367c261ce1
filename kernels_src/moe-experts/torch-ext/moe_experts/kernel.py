"""All experts of a mixture-of-experts layer in one Pallas call, for the few tokens of a decode step.

Axis letters::

    T  tokens                        H  hidden size
    C  T rounded up                  I  intermediate size
    k  choices a token               U  columns of the first product: 2I, or I without a gate
    E  experts here                  R  rows of a tile of gathered tokens

A decode step is a stream of weights: whatever is done beside it must fit into its shadow. So the call does
everything itself, and reads only the weights of experts that have tokens::

    ids [T, k] ── count ──> active experts, compact, in SMEM
    ids, routing weights ─> coefficient of each token for each expert [C, E]
    hidden [T, H] ────────> x [C, H], resident
    a shared expert: one more, with all tokens; its weights come first, before the ids are known
    for each active expert:                       DMAs of the next pieces run all the time
        for each piece of gate_up:   wait, inner[:, piece] = x · piece, refill its slot
        h = act(gate) * up
        for each piece of down:      wait, sums[:, piece] += coefficient * (h · piece), refill its slot
    out [T, H] = sums, piece by piece during the last expert

Weights are always the right operand, read as they are stored; where the contraction comes last, the matrix unit
transposes them on their way in. The few tokens stream past them.

*Dense*: every active expert computes all tokens, and a coefficient says which of them keep the result. *Gathered*
(``config.rows``): an expert computes only its own tokens, R at a time; products with one-hot matrices gather and
scatter them, so a value that is not finite is taken out before and put back, as NaN, at the end.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .activations import Gate
from .buffers import ACTIVATION_BLOCK, COUNTS_ARRIVED, OUT_ARRIVED, buffers_of
from .ragged_dot.epilogue import even_columns
from .ragged_dot.quantised import mxfp4_values
from .ragged_dot.tiles import LANES
from .shapes import BLOCK, Config, Shape

F32 = jnp.float32
RANK_BLOCK = 256


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _repeat(count: Any, visit: Callable[[Any], None]) -> None:
    """``visit(index)`` for each index below `count`, in a loop: unrolled code would be long and reordered."""

    def step(index: Any, carry: int) -> int:
        visit(index)
        return carry

    if isinstance(count, int) and count == 1:
        visit(0)
    else:
        jax.lax.fori_loop(0, count, step, 0)


def _blocks(length: int, size: int, visit: Callable[[Any, int], None]) -> None:
    """``visit(offset, size)`` for each whole block of an axis, then for the rest."""
    whole, rest = divmod(length, size)
    if whole:
        _repeat(whole, lambda index: visit(pl.multiple_of(index * size, size), size))
    if rest:
        visit(whole * size, rest)


@dataclasses.dataclass(frozen=True)
class _Stream:
    """Pieces of one projection, expert after expert, through a ring of slots.

    A *place* numbers the pieces of all active experts in order; the piece at place p is in slot ``p % slots``.
    """

    rings: tuple[tuple[Any, Any], ...]  # [E, rows, K], or [E, K, rows] with contraction_first; and its slots
    arrived: Any
    begin: int  # first row of the first piece
    piece: int
    pieces: int
    contraction_first: bool
    shared: Any = None  # [rows, K], or [K, rows]: the expert that comes after the E

    @property
    def count(self) -> int:
        """Of slots."""
        return int(self.arrived.shape[0])

    def _copies(self, index: Any, slot: Any, expert: Any = None) -> list[Any]:
        """Of a piece of an expert; unless it is given, of the shared one."""
        rows = pl.ds(pl.multiple_of(self.begin + index * self.piece, LANES), self.piece)
        there = (slice(None), rows) if self.contraction_first else (rows,)
        return [
            pltpu.make_async_copy(
                self.shared.at[there] if expert is None else weights.at[(expert, *there)],
                slots.at[slot],
                self.arrived.at[slot],
            )
            for weights, slots in self.rings
        ]

    def start(self, place: Any, experts: Any, active: Any) -> None:
        """Starts the copy of the piece at `place`, if there are so many."""
        step = jax.lax.div(place, self.pieces)

        @pl.when(step < active)
        def _() -> None:
            piece, expert = (place - step * self.pieces, jax.lax.rem(place, self.count)), experts[step]
            if self.shared is None:
                return _start(self._copies(*piece, expert))
            own = expert < self.rings[0][0].shape[0]
            pl.when(own)(lambda: _start(self._copies(*piece, expert)))
            pl.when(~own)(lambda: _start(self._copies(*piece)))

    def start_shared(self, index: Any) -> None:
        """Starts the copy of a piece of the shared expert, the first of all."""
        _start(self._copies(index, index))

    def each(self, step: Any, experts: Any, active: Any, visit: Callable[[Any, Any], None]) -> None:
        """``visit(first row, slot)`` for each piece of an expert once it is there; then refills its slot."""

        def piece(index: Any) -> None:
            place = step * self.pieces + index
            slot = jax.lax.rem(place, self.count)
            for copy in self._copies(index, slot, 0):
                copy.wait()
            visit(self.begin + index * self.piece, slot)
            self.start(place + self.count, experts, active)

        _repeat(self.pieces, piece)

    def part(self, slot: Any, offset: Any, size: int) -> list[Any]:
        """Refs of rows of a piece: [size, K], or [K, size] where the contraction is first."""
        rows = pl.ds(offset, size)
        there = (slot, slice(None), rows) if self.contraction_first else (slot, rows)
        return [slots.at[there] for _, slots in self.rings]


def _start(copies: list[Any]) -> None:
    for copy in copies:
        copy.start()


def _prime(streams: list[_Stream], experts: Any, first: int, active: Any) -> None:
    """Fills all slots for the active experts from the `first` on, one after the other, as they are used."""

    def expert(index: Any) -> None:
        step = first + index

        for stream in streams:

            def piece(index: Any, stream: _Stream = stream) -> None:
                place = step * stream.pieces + index
                pl.when(place < stream.count)(lambda: stream.start(place, experts, active))

            # In a loop, as the compiler would reorder the starts of unrolled code.
            _repeat(stream.pieces, piece)

    _repeat(max(pl.cdiv(stream.count, stream.pieces) for stream in streams) - first, expert)


def _streams(ref: Any, name: str, piece: int, *, contraction_first: bool, mxfp4: bool) -> list[_Stream]:
    """A projection's whole pieces, and the shorter one at its end where there is one."""
    weights = getattr(ref, f"{name}_hbm")
    exponents = [(getattr(ref, f"{name}_scale_hbm"), "exponents")] if mxfp4 else []
    length = weights.shape[2 if contraction_first else 1]
    whole, rest = divmod(length, piece)
    parts = [(name, 0, piece, whole)] + ([(f"{name}_rest", whole * piece, rest, 1)] if rest else [])
    return [
        _Stream(
            tuple((hbm, getattr(ref, f"{part}_{kind}")) for hbm, kind in [(weights, "slots"), *exponents]),
            getattr(ref, f"{part}_arrived"),
            begin,
            size,
            pieces,
            contraction_first,
            getattr(ref, f"shared_{name}_hbm", None),
        )
        for part, begin, size, pieces in parts
    ]


def _kernel(
    *refs: Any, names: tuple[str, ...], shape: Shape, gate: Gate, config: Config, exact_products: bool
) -> None:
    ref = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    dot = functools.partial(_dot, exact=exact_products)
    tokens, hidden = ref.x_hbm.shape
    rows = config.rows

    whole = ["index", "weights", "x", *shape.vectors, *(["shared_weights"] if shape.shared else [])]
    copies = {
        name: pltpu.make_async_copy(getattr(ref, f"{name}_hbm"), getattr(ref, name), ref.arrived.at[i])
        for i, name in enumerate(whole)
    }
    _start(list(copies.values()))

    gate_up = _streams(
        ref,
        "gate_up",
        config.gate_up_piece,
        contraction_first=shape.gate_up_contraction_first,
        mxfp4=shape.mxfp4,
    )
    down = _streams(
        ref,
        "down",
        config.down_piece,
        contraction_first=shape.down_contraction_first,
        mxfp4=shape.mxfp4,
    )
    if shape.shared:
        ref.active[0] = shape.experts
        for stream in gate_up + down:
            _repeat(min(stream.pieces, stream.count), stream.start_shared)

    # Experts with tokens, in order.
    copies["index"].wait()
    index = [_choice(ref.index, j, shape) for j in range(shape.choices)]
    if shape.shared:
        # Who names that expert does not have it twice.
        index = [jnp.where(row == shape.experts, -1, row) for row in index]
        index.append(jnp.full_like(index[0], shape.experts))
    expert = _iota((ref.counts_vector.shape[1], 1), 0)
    chosen = functools.reduce(jnp.logical_or, [row == expert for row in index])  # [E, T]
    ref.counts_vector[...] = _as_row(jnp.sum(chosen.astype(F32), axis=1, keepdims=True)).astype(jnp.int32)
    to_smem = pltpu.make_async_copy(ref.counts_vector, ref.counts, ref.arrived.at[COUNTS_ARRIVED])
    to_smem.start()
    to_smem.wait()
    active = jnp.int32(shape.shared)
    for e in range(shape.experts):
        ref.active[active] = e
        active += (ref.counts[0, e] > 0).astype(jnp.int32)

    _prime(gate_up + down, ref.active, int(shape.shared), active)

    # Until the first weights are there: coefficients, and whatever else is needed once.
    copies["weights"].wait()
    weights = [_choice(ref.weights, j, shape) for j in range(shape.choices)]
    if shape.shared:
        copies["shared_weights"].wait()
        weights.append(ref.shared_weights[...])
    by_expert = ref.coefficients_by_expert  # [E, C]
    by_expert[...] = jnp.zeros_like(by_expert)
    by_expert[:, :tokens] = functools.reduce(
        jnp.add, [jnp.where(i == expert, w, 0) for i, w in zip(index, weights, strict=True)]
    )
    ref.coefficients[...] = by_expert[...].T
    ref.sums[...] = jnp.zeros_like(ref.sums)
    copies["x"].wait()
    x = ref.x
    if hasattr(ref, "x_padded"):
        x = ref.x_padded
        x[...] = jnp.zeros_like(x)
        x[:tokens, :hidden] = ref.x[...]
    if shape.intermediate != ref.h.shape[2]:
        ref.h[:, :, shape.intermediate :] = jnp.zeros_like(ref.h[:, :, shape.intermediate :])
    if rows:
        _rank(ref, chosen, tokens, dot)
        _take_out_what_is_not_finite(ref, x, shape.all_experts)
    for name in shape.vectors:
        copies[name].wait()
        getattr(ref, f"{name}_rows")[...] = getattr(ref, name)[...].astype(F32)

    def write(at: Any, size: int) -> None:
        """Sends columns of the result that are complete on their way."""
        there = (slice(None), pl.ds(at, size))
        sums = ref.sums[there]
        if rows:
            sums = jnp.where(ref.not_finite[:, :1] > 0, jnp.nan, sums)
        ref.result[there] = sums[:tokens].astype(ref.result.dtype)
        pltpu.make_async_copy(ref.result.at[there], ref.out.at[there], ref.arrived.at[OUT_ARRIVED]).start()

    def layer(step: Any) -> None:
        e = ref.active[step]
        for name in shape.vectors:
            getattr(ref, f"{name}_row")[...] = getattr(ref, f"{name}_rows")[pl.ds(e, 1), :]

        def tiles(visit: Callable[[Any], None]) -> None:
            _repeat(pl.cdiv(ref.counts[0, e], rows) if rows else 1, visit)

        def products(name: str, streams: list[_Stream], visit: Callable[..., None]) -> None:
            """``visit(first column, size, product)`` for each block of a projection's columns."""
            for stream in streams:

                def piece(first: Any, slot: Any, stream: _Stream = stream) -> None:
                    def block(at: Any, size: int) -> None:
                        def product(value: jax.Array) -> jax.Array:
                            contract = (1, 0 if stream.contraction_first else 1)
                            held = stream.part(slot, at, size)
                            if shape.mxfp4:
                                weights = mxfp4_values(*held, ref.terms, interpreted=exact_products)
                            else:
                                weights = held[0][...]
                            result = dot(value, weights.astype(value.dtype), contract=contract)
                            there = (slice(None), pl.ds(first + at, size))
                            if f"{name}_scale" in shape.vectors:
                                result *= getattr(ref, f"{name}_scale_row")[there]
                            if f"{name}_bias" in shape.vectors:
                                result += getattr(ref, f"{name}_bias_row")[there]
                            return result

                        visit(first + at, size, product)

                    _blocks(stream.piece, BLOCK, block)

                stream.each(step, ref.active, active, piece)

        def into(first: Any, size: int, product: Callable[[jax.Array], jax.Array]) -> None:
            def tile(t: Any) -> None:
                value = product(ref.gathered[t] if rows else x[...])
                if shape.halves:
                    ref.inner[t, :, pl.ds(first, size)] = value
                else:
                    ref.inner[0, :, :size] = value
                    _activate(ref, t, gate, first, size)

            tiles(tile)

        def back(first: Any, size: int, product: Callable[[jax.Array], jax.Array]) -> None:
            def tile(t: Any) -> None:
                value = product(ref.h[t])
                if rows:
                    value = _scatter(ref, t, value, ref.counts[0, e] - t * rows, dot)
                else:
                    coefficient = ref.coefficient[:, :1]
                    value = jnp.where(coefficient != 0, coefficient * value, 0)
                ref.sums[:, pl.ds(first, size)] += value

            tiles(tile)

            @pl.when(step == active - 1)
            def _() -> None:
                write(first, size)

        if rows:
            tiles(lambda t: _gather(ref, e, t, x, dot))
        else:
            ref.coefficient[...] = jnp.broadcast_to(_column(ref.coefficients, e), ref.coefficient.shape)
        products("gate_up", gate_up, into)
        if shape.halves:
            tiles(lambda t: _combine_halves(ref, t, gate, shape.intermediate))
        products("down", down, back)

    _repeat(active, layer)

    @pl.when(active == 0)
    def _() -> None:
        _blocks(hidden, BLOCK, write)

    # The blocks were sent one by one, and arrive as one.
    pltpu.make_async_copy(ref.result, ref.out, ref.arrived.at[OUT_ARRIVED]).wait()


def _activate(ref: Any, t: Any, gate: Gate, first: Any, size: int) -> None:
    """From columns of the first product, in `inner`, to those of the second's operand that they make: no others do."""
    ratio = 2 if gate.gated else 1

    def block(at: Any, columns: int) -> None:
        x = ref.inner[0, :, pl.ds(at, columns)]
        if gate.gated:
            # Each gate meets the up beside it; what its up meets is left out.
            following = jnp.concatenate([x[:, 1:], x[:, :1]], axis=1)
            value = even_columns(gate.combine(x, following).astype(ref.h.dtype))
        else:
            value = gate.activate(x).astype(ref.h.dtype)
        place = (first + at) // ratio
        place = place if isinstance(place, int) else pl.multiple_of(place, LANES)
        ref.h[t, :, pl.ds(place, columns // ratio)] = value

    _blocks(size, ACTIVATION_BLOCK, block)


def _combine_halves(ref: Any, t: Any, gate: Gate, intermediate: int) -> None:
    """From a tile of the first product [C, 2I], all of gate before all of up, to one of the second's operand [C, I]."""

    def block(at: Any, size: int) -> None:
        of_gate, of_up = (ref.inner[t, :, pl.ds(half + at, size)] for half in (0, intermediate))
        ref.h[t, :, pl.ds(at, size)] = gate.combine(of_gate, of_up).astype(ref.h.dtype)

    # Only from a multiple of 128 on can lanes be read in a loop.
    _blocks(intermediate, ACTIVATION_BLOCK if intermediate % LANES == 0 else intermediate, block)


def _dot(a: jax.Array, b: jax.Array, *, exact: bool, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """`a` times `b` in f32. `exact`: by f32 products, for a CPU, which lacks some bf16 ones."""
    if exact:
        a, b = a.astype(F32), b.astype(F32)
    precision = jax.lax.Precision.HIGHEST if a.dtype == F32 else jax.lax.Precision.DEFAULT
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=F32)


def _choice(ref: Any, j: int, shape: Shape) -> jax.Array:
    """Choice `j` of every token, as a row [1, T]; floats in f32."""
    values = ref[...]
    values = values.astype(F32) if values.dtype == jnp.bfloat16 else values
    if shape.choices_first:
        return values[j : j + 1]
    return _as_row(values[:, j : j + 1])


def _as_row(column: jax.Array) -> jax.Array:
    """[n, 1] as [1, n]."""
    square = (column.shape[0], column.shape[0])
    diagonal = _iota(square, 0) == _iota(square, 1)
    return jnp.sum(jnp.where(diagonal, column, jnp.zeros_like(column)), axis=0, keepdims=True)


def _column(values: Any, e: Any) -> jax.Array:
    """Column `e` of a ref [C, E]: lanes cannot be read at an index that is data."""
    lane = _iota((1, values.shape[1]), 1)
    return jnp.sum(jnp.where(lane == e, values[...], 0), axis=1, keepdims=True)


# Gathered tokens.


def _rank(ref: Any, chosen: jax.Array, tokens: int, dot: Callable[..., jax.Array]) -> None:
    """Writes the rank of each token among those of each expert [E, C]; -1 where it is not routed there."""
    ref.ranks[...] = jnp.full_like(ref.ranks, -1)
    before = jnp.zeros((chosen.shape[0], 1), F32)
    for at in range(0, tokens, RANK_BLOCK):
        size = min(RANK_BLOCK, tokens - at)
        mine = chosen[:, at : at + size].astype(F32)
        earlier = (_iota((size, size), 0) < _iota((size, size), 1)).astype(F32)
        within = dot(mine.astype(jnp.bfloat16), earlier.astype(jnp.bfloat16))
        ref.ranks[:, at : at + size] = jnp.where(mine > 0, within + before, -1)
        before += jnp.sum(mine, axis=1, keepdims=True)


def _take_out_what_is_not_finite(ref: Any, x: Any, experts: int) -> None:
    """Zeroes tokens with an inf or NaN, which a one-hot product would spread, and marks those routed here."""
    # Of the rows that pad E, one is that of the index which stands for other ranks' experts.
    routed = jnp.max(jnp.where(ref.ranks[:experts] >= 0, 1.0, 0.0), axis=0, keepdims=True)
    ref.not_finite[...] = jnp.broadcast_to(routed, (LANES, routed.shape[1])).T

    def block(at: Any, size: int) -> None:
        there = pl.ds(at, size)
        value = x[there, :].astype(F32)
        bad = jnp.max(jnp.where(jnp.abs(value) < jnp.inf, 0.0, 1.0), axis=1, keepdims=True)
        x[there, :] = jnp.where(bad > 0, 0, value).astype(x.dtype)
        ref.not_finite[there, :] = bad * ref.not_finite[there, :]

    _blocks(x.shape[0], LANES, block)


def _gather(ref: Any, e: Any, t: Any, x: Any, dot: Callable[..., jax.Array]) -> None:
    """Tile `t` of an expert's tokens, where they came from, and their coefficients."""
    rows = ref.gathered.shape[1]
    mine = ref.ranks[pl.ds(e, 1), :] == (_iota((rows, 1), 0) + t * rows).astype(F32)  # [R, C]
    place = mine.astype(F32)
    ref.gathered[t] = dot(place.astype(jnp.bfloat16), x[...]).astype(ref.gathered.dtype)
    column = jnp.sum(jnp.where(mine, ref.coefficients_by_expert[pl.ds(e, 1), :], 0), axis=1, keepdims=True)
    ref.tile_coefficients[t] = jnp.broadcast_to(column, ref.tile_coefficients.shape[1:])
    # Twice: see `_scatter`.
    ref.places[t] = jnp.concatenate([place, place], axis=0).T.astype(jnp.bfloat16)


def _scatter(ref: Any, t: Any, value: jax.Array, count: Any, dot: Callable[..., jax.Array]) -> jax.Array:
    """A tile's results [R, n], weighted, in the rows of their tokens [C, n]; marks tokens that overflowed."""
    rows = value.shape[0]
    places = ref.places[t]  # [C, 2R]
    value = jnp.where(_iota((rows, 1), 0) < count, ref.tile_coefficients[t, :, :1] * value, 0)
    finite = jnp.abs(value) <= float(jnp.finfo(jnp.bfloat16).max)
    bad = jnp.max(jnp.where(finite, 0.0, 1.0), axis=1, keepdims=True)
    bad = jnp.broadcast_to(bad, (rows, LANES)).astype(jnp.bfloat16)
    ref.not_finite[...] = jnp.maximum(ref.not_finite[...], dot(places, jnp.concatenate([bad, bad], axis=0)))
    value = jnp.where(finite, value, 0)
    # Two bf16 parts of it keep 16 bits.
    high = value.astype(jnp.bfloat16)
    low = (value - high.astype(F32)).astype(jnp.bfloat16)
    return dot(places, jnp.concatenate([high, low], axis=0))


def call(
    operands: dict[str, jax.Array], shape: Shape, gate: Gate, config: Config, interpret: Any
) -> jax.Array:
    """One `pallas_call`: [T, H] from operands that all stay in HBM.

    Args:
      operands: by name: `index` and `weights` [k, T], or [T, k] unless `shape.choices_first`; `x` [T, H];
        `gate_up` [E, U, H] or [E, H, U] and `down` [E, H, I] or [E, I, H] as `shape` says; and for experts with
        biases `gate_up_bias` [E, U] and `down_bias` [E, H]; for int8 weights `gate_up_scale` and `down_scale` alike,
        for MXFP4 the exponents of its words; for a shared expert `shared_gate_up` and `shared_down`, stored as the
        others' are, and `shared_weights` [1, T] f32.
    """
    buffers = buffers_of(shape, config)
    names = (*(f"{name}_hbm" for name in operands), "out", *buffers)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    weights = [operands["gate_up"], operands["down"]]
    multiplications = shape.hidden * (shape.gate_up_columns + shape.intermediate)
    result = jax.ShapeDtypeStruct(operands["x"].shape, operands["x"].dtype)
    pairs = shape.tokens * shape.choices
    moved = sum(a.size * a.dtype.itemsize * min(shape.experts, pairs) // shape.experts for a in weights)
    return pl.pallas_call(
        functools.partial(
            _kernel, names=names, shape=shape, gate=gate, config=config, exact_products=interpret is not False
        ),
        name="fused_experts",
        out_shape=result,
        in_specs=[hbm] * len(operands),
        out_specs=hbm,
        scratch_shapes=list(buffers.values()),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=config.vmem_bytes),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * multiplications,
            bytes_accessed=moved,
            transcendentals=pairs * shape.intermediate,
        ),
        interpret=interpret,
    )(*operands.values())
