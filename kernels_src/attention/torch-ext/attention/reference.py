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


def needed(firsts: jax.Array, ends: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The keys that some new token of a sequence sees, first and end, from those of each: int32 [B, 1] twice."""
    first = jnp.min(jnp.where(firsts < ends, firsts, jnp.iinfo(jnp.int32).max), axis=1, keepdims=True)
    end = jnp.max(ends, axis=1, keepdims=True)
    return jnp.where(end > 0, first, 0), end


def written(places: jax.Array | None, first: jax.Array, end: jax.Array, new: int) -> list[jax.Array]:
    """The place of the first new key, and first and end of the keys that are written: int32 [B, 1] each."""
    place = end - new if places is None else places.astype(jnp.int32)[:, None]
    return [place, jnp.maximum(first, place), jnp.minimum(end, place + new)]


def decode_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array | None,
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
    value = key if value is None else value
    first, end = bounds(lengths, starts, new=new, keys=key.shape[2], window=window)
    return _attention(query, key, value, first, end, sinks, scale=scale, softcap=softcap)[0]


def append_attention(
    query: jax.Array,
    new_key: jax.Array,
    new_value: jax.Array | None,
    key: jax.Array,
    value: jax.Array | None,
    lengths: jax.Array,
    places: jax.Array | None = None,
    starts: jax.Array | None = None,
    sinks: jax.Array | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[jax.Array, ...]:
    """Attention of new tokens over a cache that they are written to first: see `functions.append_attention`."""
    new, keys = query.shape[2], key.shape[2]
    runs_of_keys = bounds(lengths, starts, new=new, keys=keys, window=window)
    place, first, end = written(places, *needed(*runs_of_keys), new)
    slot = jnp.arange(keys)[None]
    theirs = ((slot >= first) & (slot < end))[:, None, :, None]
    token = jnp.clip(slot - place, 0, new - 1)[:, None, :, None]

    def appended(cache: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.where(theirs, jnp.take_along_axis(rows, token, axis=2), cache)

    key = appended(key, new_key)
    value = None if value is None or new_value is None else appended(value, new_value)
    form = {"scale": scale, "window": window, "softcap": softcap}
    out = decode_attention(query, key, value, lengths, starts, sinks, **form)
    return (out, key) if value is None else (out, key, value)


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
