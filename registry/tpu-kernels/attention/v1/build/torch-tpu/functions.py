"""The op as JAX sees it: arrays in, arrays out.

Axis letters: B sequences, Hq query heads, H kv heads, L new tokens of a sequence, S keys that the cache has room for, D
and E head dimensions of keys and of values.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from . import reference
from .decode_append import new_rows
from .decode_config import choose
from .decode_kernel import call
from .shapes import LANES, Config, Shape, stored_transposed


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
    tpu: str = "v6e",
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attention of the L newest tokens of each sequence over its part of a static cache.

    One kernel call, which reads the keys and values that some token sees, to whole tiles, and nothing else of the
    cache. The gradient is that of the reference, over the whole cache.

    Args:
      query: [B, Hq, L, D], bf16 or f32; Hq is a multiple of H.
      key: [B, H, S, D]; the new tokens' keys are in it.
      value: [B, H, S, E]. D and E are free. None: the keys are the values, and are read once.
      lengths: [B] int32, valid keys of each sequence: its newest token sees keys below that, the one before it one key
        less; or [B, L], the end of the keys that each new token sees.
      starts: [B] or [B, L] int32, the first key that a sequence, or a new token, sees: left padding.
      sinks: [Hq], the score of a key without value that each query head sees beside the others.
      scale: factor of the scores; unless given 1 / sqrt(D).
      window: a token sees at most so many keys, the newest.
      softcap: scores x become ``softcap * tanh(x / softcap)``.
      tpu: generation that the kernel is made for.
      config: in place of the chosen one.
      interpret: as in `pallas_call`.

    Returns: [B, Hq, L, E] in the dtype of `query`; zeros for a token that sees no key. Sums are in f32.
    """
    static = _Static(scale or query.shape[-1] ** -0.5, window, softcap, tpu, config, interpret)
    return _decode_attention(static, query, key, value, lengths, starts, sinks)


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
    tpu: str = "v6e",
    config: Config | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """`decode_attention` that writes the new tokens' keys and values to the cache in the same kernel call.

    Only the tiles touched are written, and nothing is read for it beside what the attention reads. Where the caches
    are donated, or die here, XLA copies none of them.

    Args:
      query: [B, Hq, L, D].
      new_key: [B, H, L, D]. new_value: [B, H, L, E], or None with `value`.
      key: [B, H, S, D], what is in the new tokens' places does not matter. value: [B, H, S, E], or None.
      lengths: as in `decode_attention`: the new tokens are counted.
      places: [B] int32, where the first of the new keys goes; the others follow it. Unless given, L before the end of
        the keys that the sequence sees; a rolled cache gives its own. Keys that no new token sees are not written.
      starts, sinks, scale, window, softcap, tpu, config, interpret: as in `decode_attention`.

    Returns: [B, Hq, L, E], and the caches, key and unless None value. There is no gradient.
    """
    static = _Static(scale or query.shape[-1] ** -0.5, window, softcap, tpu, config, interpret)
    return _run(static, query, key, value, lengths, starts, sinks, (new_key, new_value, places))


@dataclasses.dataclass(frozen=True, eq=False)
class _Static:
    """What a program is specialised for. Compared by identity: `interpret` may be an unhashable record."""

    scale: float
    window: int | None
    softcap: float | None
    tpu: str
    config: Config | None
    interpret: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _decode_attention(static: _Static, *operands: Any) -> jax.Array:
    return _run(static, *operands)[0]


def _run(
    static: _Static,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array | None,
    lengths: jax.Array,
    starts: jax.Array | None,
    sinks: jax.Array | None,
    appended: tuple[jax.Array, jax.Array | None, jax.Array | None] | None = None,
) -> tuple[jax.Array, ...]:
    sequences, query_heads, new, dim = query.shape
    kv_heads, keys, value_dim = *key.shape[1:3], (key if value is None else value).shape[3]
    shape = Shape(
        sequences=sequences,
        kv_heads=kv_heads,
        keys=keys,
        rows=query_heads // kv_heads * new,
        new=new,
        head_dim=dim,
        value_dim=value_dim,
        dtype=query.dtype,
        sinks=sinks is not None,
        key_transposed=stored_transposed(keys, dim),
        value_transposed=stored_transposed(keys, value_dim),
        shared=value is None,
        appends=appended is not None,
    )
    interpret = static.interpret
    empty = 0 in query.shape or 0 in key.shape or value_dim == 0
    config = None if empty else static.config or choose(shape, static.tpu, static.window)
    if config is None:
        form = {"scale": static.scale, "window": static.window, "softcap": static.softcap}
        if appended is None:
            return (reference.decode_attention(query, key, value, lengths, starts, sinks, **form),)
        new_key, new_value, places = appended
        return reference.append_attention(
            query, new_key, new_value, key, value, lengths, places, starts, sinks, **form
        )
    if interpret is True and config.block > keys:
        config = dataclasses.replace(config, block=keys)
    firsts, ends = reference.bounds(lengths, starts, new=new, keys=keys, window=static.window)
    first, end = reference.needed(firsts, ends)
    groups, rows = kv_heads // config.heads, config.tile_rows(shape)

    def tiled(x: jax.Array, *lead: int) -> jax.Array:
        """[..., rows of all heads, n] as [*lead, rows of a work, n], padded."""
        x = x.reshape(-1, shape.rows, x.shape[-1])
        x = jnp.pad(x, ((0, 0), (0, shape.head_rows - shape.rows), (0, 0)))
        x = x.reshape(*lead, config.heads * shape.head_rows, x.shape[-1])
        return jnp.pad(x, ((0, 0), (0, rows - x.shape[1]), (0, 0)))

    def stored(x: jax.Array, transposed: bool) -> jax.Array:
        x = x.swapaxes(2, 3) if transposed else x
        x = x.reshape(sequences * groups, config.heads, *x.shape[2:])
        # Else XLA may bring a whole cache to vector memory ahead of the call.
        return x if interpret is not False else pltpu.with_memory_space_constraint(x, pltpu.HBM)

    def by_work(x: jax.Array) -> jax.Array:
        """[B, H, L, n] as [W, rows of a work, n], padded."""
        x = x.reshape(sequences * groups, config.heads * new, x.shape[-1])
        return jnp.pad(x, ((0, 0), (0, new_rows(shape, config) - x.shape[1]), (0, 0)))

    bounds = [first, end, firsts, ends]
    given: dict[str, jax.Array] = {}
    if appended is not None:
        new_key, new_value, places = appended
        bounds += reference.written(places, first, end, new)
        given = {name: by_work(x) for name, x in (("key", new_key), ("value", new_value)) if x is not None}
    if sinks is not None:
        of_rows = jnp.repeat(sinks.astype(jnp.float32), new)[:, None]
        sinks = tiled(jnp.broadcast_to(of_rows, (of_rows.shape[0], LANES)), groups)
    caches = {"key": key} if value is None else {"key": key, "value": value}
    out, *written = call(
        jnp.concatenate(bounds, axis=1).reshape(-1),
        tiled(query, sequences * groups),
        {name: stored(x, shape.caches[name][1]) for name, x in caches.items()},
        given,
        sinks,
        shape=shape,
        config=config,
        scale=static.scale,
        softcap=static.softcap,
        interpret=interpret,
    )
    out = out[:, : config.heads * shape.head_rows].reshape(-1, shape.head_rows, value_dim)
    out = out[:, : shape.rows].reshape(sequences, query_heads, new, value_dim)
    for name, x in zip(given, written, strict=True):
        x = x.reshape(sequences, kv_heads, *x.shape[2:])
        caches[name] = x.swapaxes(2, 3) if shape.caches[name][1] else x
    return (out, *caches.values()) if given else (out,)


def _composed(static: _Static, *operands: Any) -> jax.Array:
    return reference.decode_attention(
        *operands, scale=static.scale, window=static.window, softcap=static.softcap
    )


def _forward(static: _Static, *operands: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    return _decode_attention(static, *operands), operands


def _backward(static: _Static, operands: tuple[Any, ...], grad: jax.Array) -> tuple[Any, ...]:
    query, key, value, lengths, starts, sinks = operands

    def attention(query: Any, key: Any, value: Any, sinks: Any) -> jax.Array:
        return _composed(static, query, key, value, lengths, starts, sinks)

    _, pullback = jax.vjp(attention, query, key, value, sinks)
    *grads, grad_sinks = pullback(grad)
    return *grads, None, None, grad_sinks


_decode_attention.defvjp(_forward, _backward)
