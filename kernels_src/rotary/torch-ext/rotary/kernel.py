"""The Pallas kernel. Axis letters: B sequences, S tokens, H heads, D elements of a head, R of them rotated.

A block is of some tokens with all heads of both `q` and `k`, so that the tables are read once for all of them. The
element that one is rotated with comes by turning the whole row::

    x ──> * cos ───────────────────────────> + ──> result
      └─> turned by R / 2 ──> * signed sin ──┘

Past R, cos is one and sin is zero. The gradient is a rotation too, backwards: the same kernel with another `sin`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from . import reference

# Elements of all heads of a token.
MOST_ELEMENTS = 24576
# Of a block of `q` and `k`. Four are in VMEM at a time, and as much again is spilt; every generation allows 16 MiB.
_BLOCK_BYTES = 5 << 18
# The fewest tokens that a block of bf16 may have; and what the width of a head is padded to.
_LEAST, _LANES = 16, 128


def rotary(
    q: jax.Array,
    k: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    unsqueeze_dim: int = 1,
    tpu: str = "v6e",
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Rotates the first R of the D elements of each head.

    Args:
      q, k: [B, H, S, D], bf16 or f32, each with its own H; [B, S, H, D] if `unsqueeze_dim` is 2. The heads of both
        have at most `MOST_ELEMENTS` elements.
      cos, sin: [B, S, R] or [1, S, R], bf16 or f32; R is even.
      unsqueeze_dim: where the tables lack the axis of heads: 1 or 2.
      tpu: generation that the kernel is made for.
      interpret: as in `pallas_call`.

    Returns: both rotated, in their shapes and dtypes. Computed in f32.
    """

    def run(q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _of_any_layout(q, k, cos, sin, unsqueeze_dim, interpret)

    @jax.custom_vjp
    def function(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return run(*arrays)

    def forward(*arrays: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
        return run(*arrays), arrays

    def backward(arrays: tuple[jax.Array, ...], grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        *_, cos, sin = arrays
        back = run(*grads, cos, -jnp.roll(sin, sin.shape[-1] // 2, axis=-1))
        tables = jax.vjp(
            lambda *tables: reference.rotary(*arrays[:2], *tables, unsqueeze_dim=unsqueeze_dim), cos, sin
        )
        return (*back, *tables[1](grads))

    function.defvjp(forward, backward)
    return function(q, k, cos, sin)


def _of_any_layout(
    q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, unsqueeze_dim: int, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """By tokens where their heads lie side by side, also if there is one token; else head by head."""
    if q.size + k.size == 0:
        return q, k
    shapes, tokens = (q.shape, k.shape), q.shape[3 - unsqueeze_dim]
    tables = [_padded(cos, q.shape[-1], 1.0), _padded(sin, q.shape[-1], 0.0)]
    if unsqueeze_dim == 1 and tokens > 1:
        return _call([q, k], tables, cos.shape[-1], 2, interpret)
    rows = [jnp.broadcast_to(table, (q.shape[0], *table.shape[1:])) for table in tables]
    results = _call(
        [x.reshape(1, -1, x.shape[unsqueeze_dim], x.shape[3]) for x in (q, k)],
        [table.reshape(1, -1, table.shape[2]) for table in rows],
        cos.shape[-1],
        1,
        interpret,
    )
    return results[0].reshape(shapes[0]), results[1].reshape(shapes[1])


def _padded(table: jax.Array, width: int, value: float) -> jax.Array:
    return jnp.pad(table, ((0, 0), (0, 0), (0, width - table.shape[2])), constant_values=value)


def _call(
    parts: list[jax.Array], tables: list[jax.Array], width: int, axis: int, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Rotates arrays of four axes, of which `axis` is that of tokens."""
    (batch, *_), tokens, d = parts[0].shape, parts[0].shape[axis], parts[0].shape[3]
    heads = sum(part.shape[3 - axis] for part in parts)
    fitting = _BLOCK_BYTES // (heads * pl.cdiv(d, _LANES) * _LANES * parts[0].dtype.itemsize)
    rows = min(max(fitting // _LEAST * _LEAST, _LEAST), tokens)

    def block(part: jax.Array) -> pl.BlockSpec:
        count = part.shape[3 - axis]
        if axis == 1:
            return pl.BlockSpec((None, rows, count, d), lambda b, s: (b, s, 0, 0))
        return pl.BlockSpec((None, count, rows, d), lambda b, s: (b, 0, s, 0))

    def table(array: jax.Array) -> pl.BlockSpec:
        shared = array.shape[0] == 1
        return pl.BlockSpec((None, rows, d), lambda b, s: (0 if shared else b, s, 0))

    elements = sum(part.size for part in parts)
    rotated, kept = pl.pallas_call(
        lambda *refs: _block(*refs, width=width, axis=axis),
        grid=(batch, pl.cdiv(tokens, rows)),
        in_specs=[*map(block, parts), *map(table, tables)],
        out_specs=[*map(block, parts)],
        out_shape=[jax.ShapeDtypeStruct(part.shape, part.dtype) for part in parts],
        cost_estimate=pl.CostEstimate(
            flops=3 * elements,
            transcendentals=0,
            bytes_accessed=2 * elements * parts[0].dtype.itemsize
            + sum(array.size * array.dtype.itemsize for array in tables),
        ),
        name="rotary",
        interpret=interpret,
    )(*parts, *tables)
    return rotated, kept


def _block(q_ref: Any, k_ref: Any, cos_ref: Any, sin_ref: Any, *out_refs: Any, width: int, axis: int) -> None:
    place = jax.lax.broadcasted_iota(jnp.int32, cos_ref.shape, 1)
    sin = sin_ref[...].astype(jnp.float32)
    # Of the axes of a block, the tokens' is the first or the second.
    cos = jnp.expand_dims(cos_ref[...].astype(jnp.float32), 2 - axis)
    sin = jnp.expand_dims(jnp.where(place < width // 2, -sin, sin), 2 - axis)
    for ref, out_ref in zip((q_ref, k_ref), out_refs, strict=True):
        x = ref[...].astype(jnp.float32)
        out_ref[...] = (x * cos + _turned(x, width) * sin).astype(out_ref.dtype)


def _turned(x: jax.Array, width: int) -> jax.Array:
    """Brings to each of the first `width` places what it is rotated with; past them stands anything."""
    half = width // 2
    parts = [x[..., half:width], x[..., :half], x[..., width:]]
    return jnp.concatenate([part for part in parts if part.shape[-1]], axis=-1)
