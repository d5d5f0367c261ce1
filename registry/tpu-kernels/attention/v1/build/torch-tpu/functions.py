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
from .decode_config import choose
from .decode_kernel import call
from .shapes import LANES, Config, Shape, stored_transposed


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
      value: [B, H, S, E]. D and E are free.
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
def _decode_attention(
    static: _Static,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    starts: jax.Array | None,
    sinks: jax.Array | None,
) -> jax.Array:
    sequences, query_heads, new, dim = query.shape
    kv_heads, keys, value_dim = *key.shape[1:3], value.shape[3]
    if query.size == 0 or value.size == 0:
        return jnp.zeros((*query.shape[:3], value_dim), query.dtype)
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
    )
    interpret = static.interpret
    config = static.config or choose(shape, static.tpu, static.window)
    if config is None:
        return _composed(static, query, key, value, lengths, starts, sinks)
    if interpret is True and config.block > keys:
        config = dataclasses.replace(config, block=keys)
    firsts, ends = reference.bounds(lengths, starts, new=new, keys=keys, window=static.window)
    some = firsts < ends
    first = jnp.min(jnp.where(some, firsts, keys), axis=1, keepdims=True)
    end = jnp.max(ends, axis=1, keepdims=True)
    first = jnp.where(end > 0, first, 0)

    groups, rows = kv_heads // config.heads, config.tile_rows(shape)

    def tiled(x: jax.Array, *lead: int) -> jax.Array:
        """[..., rows of all heads, n] as [*lead, rows of a work, n], padded."""
        x = x.reshape(-1, shape.rows, x.shape[-1])
        x = jnp.pad(x, ((0, 0), (0, shape.head_rows - shape.rows), (0, 0)))
        x = x.reshape(*lead, config.heads * shape.head_rows, x.shape[-1])
        return jnp.pad(x, ((0, 0), (0, rows - x.shape[1]), (0, 0)))

    def cache(x: jax.Array, transposed: bool) -> jax.Array:
        x = x.swapaxes(2, 3) if transposed else x
        x = x.reshape(sequences * groups, config.heads, *x.shape[2:])
        # Else XLA may bring a whole cache to vector memory ahead of the call.
        return x if interpret is not False else pltpu.with_memory_space_constraint(x, pltpu.HBM)

    if sinks is not None:
        of_rows = jnp.repeat(sinks.astype(jnp.float32), new)[:, None]
        sinks = tiled(jnp.broadcast_to(of_rows, (of_rows.shape[0], LANES)), groups)
    out = call(
        jnp.concatenate([first, end, firsts, ends], axis=1).reshape(-1),
        tiled(query, sequences * groups),
        cache(key, shape.key_transposed),
        cache(value, shape.value_transposed),
        sinks,
        shape=shape,
        config=config,
        scale=static.scale,
        softcap=static.softcap,
        interpret=interpret,
    )
    out = out[:, : config.heads * shape.head_rows].reshape(-1, shape.head_rows, value_dim)
    return out[:, : shape.rows].reshape(sequences, query_heads, new, value_dim)


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
