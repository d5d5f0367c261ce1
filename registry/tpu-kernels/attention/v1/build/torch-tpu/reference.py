"""What the op computes, in plain jax.numpy: scores, softmax, weighted sum.

This is the definition that the kernel is tested against, and what runs on a CPU. Keys and values that no token sees
reach no result: not even as NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def bounds(
    lengths: jax.Array, starts: jax.Array | None, *, new: int, keys: int, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """The first key and the end of the keys that each new token sees: int32 [B, L] twice; 0, 0 where none.

    Args:
      lengths, starts, window: see `functions.decode_attention`.
      new: L. keys: S.
    """
    ends = lengths.astype(jnp.int32)
    if ends.ndim == 1:
        ends = ends[:, None] + jnp.arange(1 - new, 1, dtype=jnp.int32)
    firsts = jnp.zeros_like(ends)
    if starts is not None:
        firsts += starts.astype(jnp.int32).reshape(starts.shape[0], -1)
    if window is not None:
        firsts = jnp.maximum(firsts, ends - window)
    firsts, ends = jnp.maximum(firsts, 0), jnp.minimum(ends, keys)
    some = firsts < ends
    return jnp.where(some, firsts, 0), jnp.where(some, ends, 0)


def decode_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    starts: jax.Array | None = None,
    sinks: jax.Array | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Attention of new tokens over a cache: see `functions.decode_attention`."""
    _, _, new, _ = query.shape
    first, end = bounds(lengths, starts, new=new, keys=key.shape[2], window=window)
    return _attention(query, key, value, first, end, sinks, scale=scale, softcap=softcap)[0]


def _attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    first: jax.Array,
    end: jax.Array,
    sinks: jax.Array | None,
    *,
    scale: float | None,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Each query sees the keys of its run: [B, Hq, L, E], and the log-sum-exp, f32 [B, Hq, L]."""
    sequences, heads, queries, dim = query.shape
    scale = scale or dim**-0.5
    kv_heads, keys = key.shape[1:3]
    place = jnp.arange(keys)
    seen = (place >= first[..., None]) & (place < end[..., None])  # [B, L, S]
    needed = seen.any(axis=1)[:, None, :, None]
    key, value = (jnp.where(needed, each, 0).astype(jnp.float32) for each in (key, value))

    grouped = query.reshape(sequences, kv_heads, -1, queries, dim).astype(jnp.float32)
    scores = scale * jnp.einsum("bhgld,bhsd->bhgls", grouped, key, precision="highest")
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    seen = seen[:, None, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    maximum = scores.max(axis=-1, keepdims=True)
    sink = None if sinks is None else sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1)
    maximum = maximum if sink is None else jnp.maximum(maximum, sink)
    maximum = jax.lax.stop_gradient(jnp.where(maximum == -jnp.inf, 0, maximum))
    weights = jnp.where(seen, jnp.exp(scores - maximum), 0)
    total = weights.sum(axis=-1, keepdims=True)
    total = total if sink is None else total + jnp.exp(sink - maximum)
    some = total > 0
    total = jnp.where(some, total, 1)
    out = jnp.einsum("bhgls,bhse->bhgle", weights, value, precision="highest") / total
    log_sum = jnp.where(some, maximum + jnp.log(total), -jnp.inf)
    shape = sequences, heads, queries
    return out.reshape(*shape, -1).astype(query.dtype), log_sum.reshape(shape)


def runs(
    starts: jax.Array | None,
    ends: jax.Array | None,
    *,
    sequences: int,
    queries: int,
    keys: int,
    causal: bool,
    window: int | None,
) -> tuple[jax.Array, jax.Array]:
    """The run of keys that each query sees, its first and its end: int32 [B, L] twice; 0, 0 where none."""
    first = jnp.zeros((sequences, queries), jnp.int32)
    end = jnp.full((sequences, queries), keys, jnp.int32)
    if causal:
        own = jnp.arange(keys - queries + 1, keys + 1, dtype=jnp.int32)
        end = jnp.minimum(end, own)
        if window is not None:
            first = jnp.maximum(first, own - window)
    if starts is not None:
        first = jnp.maximum(first, starts.astype(jnp.int32).reshape(sequences, -1))
    if ends is not None:
        end = jnp.minimum(end, ends.astype(jnp.int32).reshape(sequences, -1))
    some = first < end
    return jnp.where(some, first, 0), jnp.where(some, end, 0)


def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    starts: jax.Array | None = None,
    ends: jax.Array | None = None,
    sinks: jax.Array | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of many queries, and the log-sum-exp: see `flash.flash_attention`."""
    sequences, _, queries, _ = query.shape
    first, end = runs(
        starts, ends, sequences=sequences, queries=queries, keys=key.shape[2], causal=causal, window=window
    )
    return _attention(query, key, value, first, end, sinks, scale=scale, softcap=softcap)
