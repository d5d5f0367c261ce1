"""`flash_attention` as JAX sees it: arrays in, arrays out; and its gradient."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from . import flash_backward, flash_forward, reference
from .flash_tiles import Blocks, Form, choose
from .shapes import LANES, round_up


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
    tpu: str = "v6e",
    blocks: Blocks | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of L queries over S keys in one kernel call, and the log-sum-exp of each query's scores.

    Args:
      query: [B, Hq, L, D], bf16 or f32; Hq is a multiple of H.
      key: [B, H, S, D]. value: [B, H, S, E].
      starts: [B] or [B, L] int32, the first key that a sequence, or a query, sees. ends: the end of the keys.
      sinks: [Hq], the score of a key without value that each query head sees beside the others.
      scale: factor of the scores; unless given 1 / sqrt(D).
      causal: query i sees keys up to S - L + i: the queries are the newest L of S tokens.
      window: with `causal`, only the newest so many of them.
      softcap: scores x become ``softcap * tanh(x / softcap)``.
      tpu: generation that the kernels are made for.
      blocks: in place of those chosen.
      interpret: as in `pallas_call`.

    Returns: [B, Hq, L, E] in the dtype of `query`, and f32 [B, Hq, L]; zeros and -inf for a query that sees no key.
    """
    static = _Static(scale or query.shape[-1] ** -0.5, causal, window, softcap, tpu, blocks, interpret)
    return _flash_attention(static, query, key, value, starts, ends, sinks)


def gradient(
    *,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    starts: jax.Array | None,
    ends: jax.Array | None,
    sinks: jax.Array | None,
    results: list[jax.Array],
    grads: list[jax.Array],
    scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    tpu: str,
    blocks: Blocks | None = None,
    interpret: Any = False,
) -> list[jax.Array | None]:
    """The gradients of query, key, value and sinks, from what `flash_attention` gave."""
    static = _Static(scale or query.shape[-1] ** -0.5, causal, window, softcap, tpu, blocks, interpret)
    operands = (query, key, value, starts, ends, sinks)
    given = _backward(static, (operands, *results), (grads[0], grads[1]))
    return [*given[:3], given[5]]


@dataclasses.dataclass(frozen=True, eq=False)
class _Static:
    """What a program is specialised for. Compared by identity: `interpret` may be an unhashable record."""

    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    tpu: str
    blocks: Blocks | None
    interpret: Any

    def form(self, query: jax.Array, key: jax.Array, value: jax.Array, *, sinks: bool) -> Form:
        """What the kernels are made for."""
        sequences, heads, queries, dim = query.shape
        return Form(
            sequences=sequences,
            heads=heads,
            kv_heads=key.shape[1],
            queries=queries,
            keys=key.shape[2],
            head_dim=dim,
            value_dim=value.shape[3],
            dtype=query.dtype,
            causal=self.causal,
            window=self.window,
            softcap=self.softcap,
            scale=self.scale,
            sinks=sinks,
        )

    def runs(
        self, query: jax.Array, key: jax.Array, starts: jax.Array | None, ends: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Each query's run of keys, [B, L] twice."""
        return reference.runs(
            starts,
            ends,
            sequences=query.shape[0],
            queries=query.shape[2],
            keys=key.shape[2],
            causal=self.causal,
            window=self.window,
        )


def _flat(x: jax.Array, turned: bool) -> jax.Array:
    """[B, H, n, dim] as [B * H, n, dim], or [B * H, dim, n], which costs nothing where XLA stores it so."""
    x = x.reshape(-1, *x.shape[2:])
    return x.swapaxes(1, 2) if turned else x


def _unflat(x: jax.Array, turned: bool, like: tuple[int, ...]) -> jax.Array:
    return (x.swapaxes(1, 2) if turned else x).reshape(like)


def _padded_runs(first: jax.Array, end: jax.Array, blocks: Blocks) -> list[jax.Array]:
    queries = first.shape[1]
    rest = round_up(queries, blocks.queries) - queries
    return [jnp.pad(x, ((0, 0), (0, rest)))[:, None] for x in (first, end)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash_attention(
    static: _Static,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    starts: jax.Array | None,
    ends: jax.Array | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    form = static.form(query, key, value, sinks=sinks is not None)
    blocks = static.blocks or choose(form, static.tpu, flash_forward.vmem_bytes)
    shape = query.shape[:3]
    if query.size == 0 or value.size == 0:
        return jnp.zeros((*shape, form.value_dim), query.dtype), jnp.full(shape, -jnp.inf)
    if blocks is None:
        return _composed(static, query, key, value, starts, ends, sinks)
    out, log_sum = flash_forward.call(
        *_padded_runs(*static.runs(query, key, starts, ends), blocks),
        _flat(query, form.query_turned(form.head_dim)),
        _flat(key, form.key_turned(form.head_dim)),
        _flat(value, form.key_turned(form.value_dim)),
        None if sinks is None else sinks.astype(jnp.float32),
        form=form,
        blocks=blocks,
        interpret=static.interpret,
    )
    out = _unflat(out, form.query_turned(form.value_dim), (*shape, form.value_dim))
    return out, log_sum.reshape(shape)


def _composed(static: _Static, *operands: Any) -> tuple[jax.Array, jax.Array]:
    return reference.flash_attention(
        *operands, scale=static.scale, causal=static.causal, window=static.window, softcap=static.softcap
    )


def _forward(static: _Static, *operands: Any) -> tuple[Any, Any]:
    results = _flash_attention(static, *operands)
    return results, (operands, *results)


def _backward(static: _Static, residuals: tuple[Any, ...], grads: tuple[Any, Any]) -> tuple[Any, ...]:
    operands, out, log_sum = residuals
    query, key, value, starts, ends, sinks = operands
    grad = grads[0].astype(query.dtype)
    form = static.form(query, key, value, sinks=False)
    if query.size == 0 or value.size == 0:
        zeros = [None if x is None else jnp.zeros_like(x) for x in (query, key, value, sinks)]
        return *zeros[:3], None, None, zeros[3]
    piece = _piece(static, form)
    if piece is None:

        def composed(query: Any, key: Any, value: Any, sinks: Any) -> Any:
            return _composed(static, query, key, value, starts, ends, sinks)

        _, pullback = jax.vjp(composed, query, key, value, sinks)
        *given, of_sinks = pullback((grad, grads[1]))
        return *given, None, None, of_sinks
    delta = (grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - grads[1]
    first, end = static.runs(query, key, starts, ends)

    of_query: Any = 0.0
    of_keys, of_values = [], []
    whole = piece >= form.keys
    for begin in range(0, form.keys, piece):
        keys, values = (x[:, :, begin : begin + piece] for x in (key, value))
        part = dataclasses.replace(form, keys=keys.shape[2])
        blocks = static.blocks or choose(part, static.tpu, flash_backward.vmem_bytes)
        assert blocks is not None
        query_turned, key_turned = part.query_turned(part.head_dim), part.key_turned(part.head_dim)
        value_turned = part.key_turned(part.value_dim)
        query_grad, key_grad, value_grad = flash_backward.call(
            *_padded_runs(*_clipped(first - begin, end - begin, part.keys), blocks),
            _flat(query, query_turned),
            _flat(keys, key_turned),
            _flat(values, value_turned),
            _flat(grad, part.query_turned(part.value_dim)),
            log_sum.reshape(-1, 1, part.queries),
            delta.reshape(-1, 1, part.queries),
            form=part,
            blocks=blocks,
            query_grad_dtype=query.dtype if whole else jnp.float32,
            interpret=static.interpret,
        )
        of_query += _unflat(query_grad, query_turned, query.shape)
        of_keys.append(_unflat(key_grad, key_turned, keys.shape))
        of_values.append(_unflat(value_grad, value_turned, values.shape))
    of_sinks = None
    if sinks is not None:
        shares = jnp.exp(sinks.astype(jnp.float32)[:, None] - log_sum)
        of_sinks = -(shares * delta).sum((0, 2)).astype(sinks.dtype)
    return (
        of_query.astype(query.dtype),
        jnp.concatenate(of_keys, axis=2),
        jnp.concatenate(of_values, axis=2),
        None,
        None,
        of_sinks,
    )


def _clipped(first: jax.Array, end: jax.Array, keys: int) -> tuple[jax.Array, jax.Array]:
    first, end = jnp.maximum(first, 0), jnp.minimum(end, keys)
    some = first < end
    return jnp.where(some, first, 0), jnp.where(some, end, 0)


def _piece(static: _Static, form: Form) -> int | None:
    """How many keys the backward kernel takes at once: all, or the largest power of two that has room."""
    if static.blocks is not None:
        return form.keys
    powers = [1 << n for n in range(form.keys.bit_length() - 1, -1, -1) if 1 << n >= LANES]
    for piece in (form.keys, *powers):
        part = dataclasses.replace(form, keys=piece)
        if choose(part, static.tpu, flash_backward.vmem_bytes) is not None:
            return piece
    return None


_flash_attention.defvjp(_forward, _backward)
