"""All experts of a mixture-of-experts layer in one Pallas call, for the few tokens of a decode step.

Axis letters::

    T  tokens                        H  hidden size
    C  columns: T rounded up         I  intermediate size
    k  choices a token               U  rows of gate_up: 2I, or I without a gate
    E  experts here                  R  columns of a tile of gathered tokens

A decode step is a stream of weights: whatever is done beside it must fit into its shadow. So the call does
everything itself, and reads only the weights of experts that have tokens::

    ids [T, k] ── count ──> active experts, compact, in SMEM
    ids, routing weights ─> coefficient of each expert for each token [E, C]
    hidden [T, H] ────────> x [H, C], resident
    for each active expert:                       DMAs of the next pieces run all the time
        for each piece of gate_up:   wait, inner[piece] = piece · x, refill its slot
        h = act(gate) * up
        for each piece of down:      wait, sums[piece] += coefficient * (piece · h), refill its slot
    out [T, H] = sums, transposed

Values are kept transposed, `[features, tokens]`: the weights are the left operand that streams through the
matrix unit, the few tokens the right one that stays there, and no weight is ever transposed. A weight that is
stored with its contraction first is the right operand instead, and the small result is transposed.

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
from .buffers import COUNTS_ARRIVED, OUT_ARRIVED, buffers_of
from .shapes import LANES, Config, Shape

F32 = jnp.float32
# Columns (or rows) of a weight that one product takes: longer ones are unrolled into more code for nothing.
BLOCK = 768
ACTIVATION_BLOCK = 256
RANK_BLOCK = 256
TRANSPOSE_BLOCK = 256


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

    weights: Any  # [E, rows, K], or [E, K, rows] with contraction_first
    slots: Any
    arrived: Any
    begin: int  # first row of the first piece
    piece: int
    pieces: int
    contraction_first: bool

    def _copy(self, expert: Any, index: Any, slot: Any) -> Any:
        rows = pl.ds(pl.multiple_of(self.begin + index * self.piece, LANES), self.piece)
        source = self.weights.at[(expert, slice(None), rows) if self.contraction_first else (expert, rows)]
        return pltpu.make_async_copy(source, self.slots.at[slot], self.arrived.at[slot])

    def start(self, place: Any, experts: Any, active: Any) -> None:
        """Starts the copy of the piece at `place`, if there are so many."""
        step = jax.lax.div(place, self.pieces)

        @pl.when(step < active)
        def _() -> None:
            slot = jax.lax.rem(place, self.slots.shape[0])
            self._copy(experts[step], place - step * self.pieces, slot).start()

    def prime(self, experts: Any, active: Any) -> None:
        """Fills all slots. In a loop, as the compiler would reorder the starts of unrolled code."""
        _repeat(self.slots.shape[0], lambda place: self.start(place, experts, active))

    def each(self, step: Any, experts: Any, active: Any, visit: Callable[[Any, Any], None]) -> None:
        """``visit(first row, slot)`` for each piece of an expert once it is there; then refills its slot."""

        def piece(index: Any) -> None:
            place = step * self.pieces + index
            slot = jax.lax.rem(place, self.slots.shape[0])
            self._copy(0, index, slot).wait()
            visit(self.begin + index * self.piece, slot)
            self.start(place + self.slots.shape[0], experts, active)

        _repeat(self.pieces, piece)

    def read(self, slot: Any, offset: Any, size: int) -> jax.Array:
        """Rows of a piece: [size, K], or [K, size] where the contraction is first."""
        if self.contraction_first:
            return self.slots[slot, :, pl.ds(offset, size)]
        return self.slots[slot, pl.ds(offset, size), :]


def _streams(ref: Any, name: str, piece: int, *, contraction_first: bool) -> list[_Stream]:
    """A projection's whole pieces, and the shorter one at its end where there is one."""
    weights = getattr(ref, f"{name}_hbm")
    length = weights.shape[2 if contraction_first else 1]
    whole, rest = divmod(length, piece)
    parts = [(name, 0, piece, whole)] + ([(f"{name}_rest", whole * piece, rest, 1)] if rest else [])
    return [
        _Stream(
            weights,
            getattr(ref, f"{part}_slots"),
            getattr(ref, f"{part}_arrived"),
            begin,
            size,
            pieces,
            contraction_first,
        )
        for part, begin, size, pieces in parts
    ]


def _kernel(
    *refs: Any, names: tuple[str, ...], shape: Shape, gate: Gate, config: Config, exact_products: bool
) -> None:
    ref = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    dot = functools.partial(_dot, exact=exact_products)
    tokens, hidden = ref.x_hbm.shape
    columns, rows = config.columns(tokens), config.rows
    biased = shape.biased

    whole = ["index", "weights", "x", *(["gate_up_bias", "down_bias"] if biased else [])]
    copies = {
        name: pltpu.make_async_copy(getattr(ref, f"{name}_hbm"), getattr(ref, name), ref.arrived.at[i])
        for i, name in enumerate(whole)
    }
    for copy in copies.values():
        copy.start()

    # Experts with tokens, in order.
    copies["index"].wait()
    index = [_choice(ref.index, j, shape) for j in range(shape.choices)]
    expert = _iota((ref.coefficients.shape[0], 1), 0)
    chosen = functools.reduce(jnp.logical_or, [row == expert for row in index])  # [E, T]
    counts = jnp.sum(chosen.astype(F32), axis=1, keepdims=True)
    diagonal = _iota((counts.shape[0], ref.counts_vector.shape[1]), 0) == _iota(
        (counts.shape[0], ref.counts_vector.shape[1]), 1
    )
    ref.counts_vector[...] = jnp.sum(jnp.where(diagonal, counts, 0), axis=0, keepdims=True).astype(jnp.int32)
    to_smem = pltpu.make_async_copy(ref.counts_vector, ref.counts, ref.arrived.at[COUNTS_ARRIVED])
    to_smem.start()
    to_smem.wait()
    active = jnp.int32(0)
    for e in range(shape.experts):
        ref.active[active] = e
        active += (ref.counts[0, e] > 0).astype(jnp.int32)

    gate_up = _streams(
        ref, "gate_up", config.gate_up_piece, contraction_first=shape.gate_up_contraction_first
    )
    down = _streams(ref, "down", config.down_piece, contraction_first=shape.down_contraction_first)
    for stream in gate_up + down:
        stream.prime(ref.active, active)

    # Until the first weights are there: coefficients, and the tokens as columns.
    copies["weights"].wait()
    weights = [_choice(ref.weights, j, shape) for j in range(shape.choices)]
    ref.coefficients[...] = jnp.zeros_like(ref.coefficients)
    ref.coefficients[:, :tokens] = functools.reduce(
        jnp.add, [jnp.where(i == expert, w, 0) for i, w in zip(index, weights, strict=True)]
    )
    ref.sums[...] = jnp.zeros_like(ref.sums)
    copies["x"].wait()
    if columns != tokens:
        ref.x_rows[...] = jnp.zeros_like(ref.x_rows)
        ref.x_rows[:tokens] = ref.x[...]
    x_rows = ref.x_rows if columns != tokens else ref.x
    if rows:
        _rank(ref, chosen, tokens, dot)
        _take_out_what_is_not_finite(ref, x_rows)
    if not shape.gate_up_contraction_first:
        _transpose(x_rows, ref.x_columns)
    for name in ("gate_up", "down") if biased else ():
        copies[f"{name}_bias"].wait()
        getattr(ref, f"{name}_bias_rows")[...] = getattr(ref, f"{name}_bias")[...].astype(F32)

    def write(at: Any, size: int) -> None:
        """Sends features of the result that are complete on their way."""
        sums = ref.sums[pl.ds(at, size), :]
        if rows:
            sums = jnp.where(ref.not_finite[:1] > 0, jnp.nan, sums)
        there = (slice(None), pl.ds(at, size))
        ref.result[there] = sums.T[:tokens].astype(ref.result.dtype)
        pltpu.make_async_copy(ref.result.at[there], ref.out.at[there], ref.arrived.at[OUT_ARRIVED]).start()

    def layer(step: Any) -> None:
        e = ref.active[step]
        for name in ("gate_up", "down") if biased else ():
            getattr(ref, f"{name}_bias_row")[...] = getattr(ref, f"{name}_bias_rows")[pl.ds(e, 1), :]

        def tiles(visit: Callable[[Any], None]) -> None:
            _repeat(pl.cdiv(ref.counts[0, e], rows) if rows else 1, visit)

        def products(streams: list[_Stream], bias: str, visit: Callable[..., None]) -> None:
            """``visit(first row, product function)`` for each block of a projection's rows."""
            for stream in streams:

                def piece(first: Any, slot: Any, stream: _Stream = stream) -> None:
                    def block(at: Any, size: int) -> None:
                        row = getattr(ref, bias)[:, pl.ds(first + at, size)] if biased else None
                        visit(
                            first + at,
                            size,
                            lambda value: _product(stream.read(slot, at, size), value, row, stream, dot),
                        )

                    _blocks(stream.piece, BLOCK, block)

                stream.each(step, ref.active, active, piece)

        def into(first: Any, size: int, product: Callable[[jax.Array], jax.Array]) -> None:
            def tile(t: Any) -> None:
                x = ref.gathered.at[t] if rows else x_rows if shape.gate_up_contraction_first else ref.x_columns
                ref.inner[t, pl.ds(first, size), :] = product(x[...])

            tiles(tile)

        def back(first: Any, size: int, product: Callable[[jax.Array], jax.Array]) -> None:
            def tile(t: Any) -> None:
                value = product(ref.h[t])
                if rows:
                    value = _scatter(ref, t, value, ref.counts[0, e] - t * rows, dot)
                else:
                    coefficient = ref.coefficients[pl.ds(e, 1), :]
                    value = jnp.where(coefficient != 0, coefficient * value, 0)
                ref.sums[pl.ds(first, size), :] += value

            tiles(tile)

            @pl.when(step == active - 1)
            def _() -> None:
                write(first, size)

        if rows:
            tiles(lambda t: _gather(ref, e, t, shape.gate_up_contraction_first, x_rows, dot))
        products(gate_up, "gate_up_bias_row", into)
        tiles(lambda t: _activate(ref.inner.at[t], ref.h.at[t], gate, as_rows=shape.down_contraction_first))
        products(down, "down_bias_row", back)

    _repeat(active, layer)

    @pl.when(active == 0)
    def _() -> None:
        _blocks(hidden, BLOCK, write)

    # The blocks were sent one by one, and arrive as one.
    pltpu.make_async_copy(ref.result, ref.out, ref.arrived.at[OUT_ARRIVED]).wait()


def _product(
    weight: jax.Array, value: jax.Array, bias: jax.Array | None, stream: _Stream, dot: Callable[..., jax.Array]
) -> jax.Array:
    """`weight` times `value`, and `bias` [1, n] added: [n, columns]."""
    if stream.contraction_first:
        result = dot(value, weight)
        return (result if bias is None else result + bias).T
    result = dot(weight, value)
    if bias is None:
        return result
    return result + jnp.broadcast_to(bias, (LANES, bias.shape[1])).T[:, :1]


def _activate(both: Any, h: Any, gate: Gate, *, as_rows: bool) -> None:
    """From the first product, a ref [U, columns], to the second one's operand [I, columns], or [columns, I]."""
    inner = h.shape[1 if as_rows else 0]

    def block(at: Any, size: int) -> None:
        if not gate.gated:
            value = gate.activate(both[pl.ds(at, size), :])
        elif gate.interleaved:
            even, odd = (pl.ds(2 * at + first, size, stride=2) for first in (0, 1))
            value = gate.combine(both[even, :], both[odd, :])
        else:
            value = gate.combine(both[pl.ds(at, size), :], both[pl.ds(inner + at, size), :])
        if as_rows:
            h[:, pl.ds(at, size)] = value.T.astype(h.dtype)
        else:
            h[pl.ds(at, size), :] = value.astype(h.dtype)

    _blocks(inner, ACTIVATION_BLOCK, block)


def _dot(a: jax.Array, b: jax.Array, *, exact: bool, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """`a` times `b` in f32. `exact`: by f32 products, for a CPU, which lacks some bf16 ones."""
    if exact:
        a, b = a.astype(F32), b.astype(F32)
    precision = jax.lax.Precision.HIGHEST if a.dtype == F32 else jax.lax.Precision.DEFAULT
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=F32)


def _choice(ref: Any, j: int, shape: Shape) -> jax.Array:
    """Choice `j` of every token, as a row [1, T]; floats in f32."""
    if shape.choices_first:
        values = ref[...]
        return (values.astype(F32) if values.dtype == jnp.bfloat16 else values)[j : j + 1]
    values = ref[...]
    values = values.astype(F32) if values.dtype == jnp.bfloat16 else values
    column = values[:, j : j + 1]
    tokens = column.shape[0]
    square = (tokens, tokens)
    diagonal = _iota(square, 0) == _iota(square, 1)
    return jnp.sum(jnp.where(diagonal, column, jnp.zeros_like(column)), axis=0, keepdims=True)


def _transpose(rows: Any, columns: Any) -> None:
    """Writes a ref [C, H] into one of [H, C]."""

    def block(at: Any, size: int) -> None:
        columns[pl.ds(at, size), :] = rows[:, pl.ds(at, size)].astype(F32).T.astype(columns.dtype)

    _blocks(rows.shape[1], TRANSPOSE_BLOCK, block)


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


def _take_out_what_is_not_finite(ref: Any, x_rows: Any) -> None:
    """Zeroes tokens with an inf or NaN, which a one-hot product would spread, and marks those routed here."""
    routed = jnp.max(jnp.where(ref.ranks[...] >= 0, 1.0, 0.0), axis=0, keepdims=True)

    def block(at: Any, size: int) -> None:
        x = x_rows[pl.ds(at, size), :].astype(F32)
        bad = jnp.max(jnp.where(jnp.abs(x) < jnp.inf, 0.0, 1.0), axis=1, keepdims=True)
        x_rows[pl.ds(at, size), :] = jnp.where(bad > 0, 0, x).astype(x_rows.dtype)
        ref.not_finite[:, pl.ds(at, size)] = jnp.broadcast_to(bad, (size, LANES)).T[:8]

    _blocks(x_rows.shape[0], LANES, block)
    ref.not_finite[...] *= routed


def _gather(ref: Any, e: Any, t: Any, as_rows: bool, x_rows: Any, dot: Callable[..., jax.Array]) -> None:
    """Tile `t` of an expert's tokens, where they came from, and their coefficients."""
    rows = ref.places.shape[1]
    mine = ref.ranks[pl.ds(e, 1), :] == (_iota((rows, 1), 0) + t * rows).astype(F32)  # [R, C]
    place = mine.astype(F32).astype(jnp.bfloat16)
    ref.places[t] = place
    if as_rows:
        gathered = dot(place, x_rows[...])
    else:
        gathered = dot(ref.x_columns[...], place, contract=(1, 1))
    ref.gathered[t] = gathered.astype(ref.gathered.dtype)
    column = jnp.sum(jnp.where(mine, ref.coefficients[pl.ds(e, 1), :], 0), axis=1, keepdims=True)
    diagonal = _iota((rows, rows), 0) == _iota((rows, rows), 1)
    row = jnp.sum(jnp.where(diagonal, column, 0), axis=0, keepdims=True)
    ref.tile_coefficients[t] = jnp.broadcast_to(row, ref.tile_coefficients.shape[1:])


def _scatter(ref: Any, t: Any, value: jax.Array, count: Any, dot: Callable[..., jax.Array]) -> jax.Array:
    """A tile's results [n, R], weighted, in the columns of their tokens [n, C]; marks tokens that overflowed."""
    place = ref.places[t]
    rows = place.shape[0]
    value = jnp.where(_iota((1, rows), 1) < count, ref.tile_coefficients[t, :1] * value, 0)
    finite = jnp.abs(value) < jnp.inf
    bad = jnp.max(jnp.where(finite, 0.0, 1.0), axis=0, keepdims=True)
    bad = jnp.broadcast_to(bad, (8, rows)).astype(jnp.bfloat16)
    ref.not_finite[...] = jnp.maximum(ref.not_finite[...], dot(bad, place))
    value = jnp.where(finite, value, 0)
    # Two bf16 parts of it keep 16 bits.
    high = value.astype(jnp.bfloat16)
    low = (value - high.astype(F32)).astype(jnp.bfloat16)
    return dot(jnp.concatenate([high, low], axis=1), jnp.concatenate([place, place], axis=0))


def call(
    operands: dict[str, jax.Array], shape: Shape, gate: Gate, config: Config, interpret: Any
) -> jax.Array:
    """One `pallas_call`: [T, H] from operands that all stay in HBM.

    Args:
      operands: by name: `index` and `weights` [k, T], or [T, k] unless `shape.choices_first`; `x` [T, H];
        `gate_up` [E, U, H] or [E, H, U] and `down` [E, H, I] or [E, I, H] as `shape` says; and for experts with
        biases `gate_up_bias` [E, U] and `down_bias` [E, H].
    """
    buffers = buffers_of(shape, config)
    names = (*(f"{name}_hbm" for name in operands), "out", *buffers)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    weights = [operands["gate_up"], operands["down"]]
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
            flops=2 * pairs * sum(a.size // shape.experts for a in weights),
            bytes_accessed=moved,
            transcendentals=pairs * shape.intermediate,
        ),
        interpret=interpret,
    )(*operands.values())
