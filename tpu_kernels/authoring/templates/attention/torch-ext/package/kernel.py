"""The Pallas kernel. Axis letters: B sequences, H query heads, G heads of keys, L queries, S keys, D head dimension.

A step of the grid has a block of queries of one head, and all of that head's keys and values in VMEM. Steps of the
same head follow each other, so that these are read once.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from . import reference
from .gradient import with_gradient_of
from .tiles import Tiles, choose

MOST_KEYS, MOST_DIM = 4096, 256
# Of a block of scores in float32. With those of keys and values it is less than every generation allows.
SCORE_BYTES = 1 << 20


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = False,
    tpu: str = "v6e",
    interpret: Any = False,
) -> jax.Array:
    """Attention of query heads over the heads of keys that they share.

    Args:
      query: [B, H, L, D], bf16 or f32; H is a multiple of G.
      key, value: [B, G, S, D], the dtype of `query`; S of up to `MOST_KEYS`, D of up to `MOST_DIM`.
      causal: the last query sees all keys, each one before it one less; then L is at most S.
      tpu: generation that the kernel is made for.
      interpret: as in `pallas_call`.

    Returns: [B, H, L, D] in the dtype of `query`. Softmax and sums are in f32.
    """
    kernel = functools.partial(_of_any_sizes, causal=causal, tpu=tpu, interpret=interpret)
    return with_gradient_of(functools.partial(reference.attention, causal=causal), kernel)(query, key, value)


def _of_any_sizes(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool, tpu: str, interpret: Any
) -> jax.Array:
    if query.size == 0:
        return query
    _, heads, queries, dim = query.shape
    keys = key.shape[2]
    arrays = {"query": query, "key": key, "value": value}
    sizes = {"heads": query.shape[0] * heads, "queries": queries, "keys": keys, "dim": dim}
    offered = [Tiles(rows, keys) for rows in (256, 128, 64) if rows * keys * 4 <= SCORE_BYTES]
    tiles = choose(_attention, arrays, sizes, offered, tpu)
    return _attention(**arrays, tiles=tiles, causal=causal, interpret=interpret)


def _attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    tiles: Tiles,
    causal: bool = False,
    interpret: Any = False,
) -> jax.Array:
    sequences, heads, queries, dim = query.shape
    groups, keys = key.shape[1:3]
    rows = min(tiles.rows, queries)
    block = pl.BlockSpec((None, None, rows, dim), lambda b, h, i: (b, h, i, 0))
    of_group = pl.BlockSpec((None, None, keys, dim), lambda b, h, i: (b, h // (heads // groups), 0, 0))
    size = (2 * query.size + key.size + value.size) * query.dtype.itemsize
    return pl.pallas_call(
        functools.partial(_block, causal=causal, queries=queries),
        grid=(sequences, heads, pl.cdiv(queries, rows)),
        in_specs=[block, of_group, of_group],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        cost_estimate=pl.CostEstimate(
            flops=4 * query.size * keys,
            transcendentals=sequences * heads * queries * keys,
            bytes_accessed=size,
        ),
        name="attention",
        interpret=interpret,
    )(query, key, value)


def _block(query_ref: Any, key_ref: Any, value_ref: Any, out_ref: Any, *, causal: bool, queries: int) -> None:
    rows, dim = query_ref.shape
    keys = key_ref.shape[0]
    precision = jax.lax.Precision.HIGHEST if query_ref.dtype == jnp.float32 else None
    dot = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    scores = dot(query_ref[...], key_ref[...], (((1,), (1,)), ((), ()))) * dim**-0.5
    if causal:
        row = pl.program_id(2) * rows + jax.lax.broadcasted_iota(jnp.int32, (rows, keys), 0)
        column = jax.lax.broadcasted_iota(jnp.int32, (rows, keys), 1)
        scores = jnp.where(column <= row + (keys - queries), scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True))
    sums = jnp.sum(weights, axis=1, keepdims=True)
    out = dot(weights.astype(value_ref.dtype), value_ref[...], (((1,), (0,)), ((), ())))
    out_ref[...] = (out / sums).astype(out_ref.dtype)
