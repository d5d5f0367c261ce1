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
    sequences, heads, new, dim = query.shape
    scale = scale or dim**-0.5
    kv_heads, keys = key.shape[1:3]
    first, end = bounds(lengths, starts, new=new, keys=keys, window=window)
    place = jnp.arange(keys)
    seen = (place >= first[..., None]) & (place < end[..., None])  # [B, L, S]
    needed = seen.any(axis=1)[:, None, :, None]
    key, value = (jnp.where(needed, each, 0).astype(jnp.float32) for each in (key, value))

    queries = query.reshape(sequences, kv_heads, -1, new, dim).astype(jnp.float32)
    scores = scale * jnp.einsum("bhgld,bhsd->bhgls", queries, key, precision="highest")
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
    out = jnp.einsum("bhgls,bhse->bhgle", weights, value, precision="highest")
    out = out / jnp.where(total == 0, 1, total)
    return out.reshape(sequences, heads, new, -1).astype(query.dtype)
