"""A float64 oracle in numpy, loops and all, and steps to try it on."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def f64(x) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(jnp.float32)).astype(np.float64)


def keys_seen(lengths, starts, window, new, keys) -> list[list[range]]:
    """The keys that each new token of each sequence sees."""
    seen = []
    for b, length in enumerate(np.asarray(lengths)):
        ends = length if np.ndim(length) else [length - (new - 1 - token) for token in range(new)]
        firsts = np.broadcast_to(0 if starts is None else np.asarray(starts)[b], (new,))
        if window is not None:
            firsts = [max(first, end - window) for first, end in zip(firsts, ends, strict=True)]
        seen.append([range(max(first, 0), min(end, keys)) for first, end in zip(firsts, ends, strict=True)])
    return seen


def decode_attention(
    query, key, value, lengths, starts=None, sinks=None, *, scale, window=None, softcap=None
) -> np.ndarray:
    query, key, value = (f64(a) for a in (query, key, value))
    batch, heads, new, _ = query.shape
    group = heads // key.shape[1]
    seen = keys_seen(lengths, starts, window, new, key.shape[2])
    out = np.zeros((batch, heads, new, value.shape[3]))
    for b, h, token in np.ndindex(batch, heads, new):
        these = seen[b][token]
        if not len(these):
            continue
        scores = scale * key[b, h // group, these] @ query[b, h, token]
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        extra = [] if sinks is None else [f64(sinks)[h]]
        weights = np.exp(np.append(scores, extra) - max([*scores, *extra]))
        out[b, h, token] = (weights / weights.sum())[: len(these)] @ value[b, h // group, these]
    return out


def relative_l2(actual, expected: np.ndarray) -> float:
    actual = f64(actual)
    assert actual.shape == expected.shape
    norm = np.linalg.norm(expected)
    return float(np.linalg.norm(actual - expected) / norm) if norm else float(np.abs(actual).max(initial=0))


@dataclasses.dataclass(frozen=True)
class Step:
    """A decode step with random numbers: the operands, and the keywords that say what they are."""

    operands: tuple[jax.Array | None, ...]
    form: dict[str, Any]

    def expected(self) -> np.ndarray:
        return decode_attention(*self.operands, **self.form)


def step(
    lengths,
    *,
    heads: int,
    kv_heads: int,
    keys: int,
    dim: int,
    value_dim: int | None = None,
    new: int = 1,
    starts=None,
    sinks: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    **form: Any,
) -> Step:
    """A step whose keys and values before and after those that some token sees are poisoned: NaN and inf."""
    rng = np.random.default_rng(seed)
    batch = len(lengths)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape)

    key = normal(batch, kv_heads, keys, dim)
    value = normal(batch, kv_heads, keys, value_dim or dim)
    for b, seen in enumerate(keys_seen(lengths, starts, form.get("window"), new, keys)):
        some = [k for these in seen if len(these) for k in (these[0], these[-1])]
        unseen = [k for k in range(keys) if not some or not min(some) <= k <= max(some)]
        key[b, :, unseen], value[b, :, unseen] = np.nan, np.inf
    operands = (
        jnp.asarray(normal(batch, heads, new, dim), dtype),
        jnp.asarray(key, dtype),
        jnp.asarray(value, dtype),
        jnp.asarray(lengths, jnp.int32),
        None if starts is None else jnp.asarray(starts, jnp.int32),
        jnp.asarray(normal(heads), dtype) if sinks else None,
    )
    return Step(operands, {"scale": dim**-0.5, **form})


@dataclasses.dataclass(frozen=True)
class Pass:
    """Attention of many queries on random numbers: operands, keywords, and the gradient of the result."""

    operands: tuple[jax.Array | None, ...]
    form: dict[str, Any]
    grad: jax.Array

    def expected(self) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """The result, the log-sum-exp and the gradients of query, key, value and sinks, if any."""
        return flash_attention(*self.operands, grad=self.grad, **self.form)


def visible(queries, keys, starts, ends, *, causal=False, window=None) -> np.ndarray:
    """Which keys each query sees: [L, S], with one sequence's starts and ends."""
    own = np.arange(queries)[:, None] + keys - queries + 1
    key = np.arange(keys)[None]
    seen = np.ones((queries, keys), bool)
    if causal:
        seen &= key < own
    if window is not None:
        seen &= key >= own - window
    if starts is not None:
        seen &= key >= np.reshape(starts, (-1, 1))
    if ends is not None:
        seen &= key < np.reshape(ends, (-1, 1))
    return seen


def flash_attention(
    query, key, value, starts=None, ends=None, sinks=None, *, grad, scale, softcap=None, **mask
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    query, key, value, grad = (f64(a) for a in (query, key, value, grad))
    batch, heads, queries, _ = query.shape
    group = heads // key.shape[1]
    out, log_sum = np.zeros((*query.shape[:3], value.shape[3])), np.full(query.shape[:3], -np.inf)
    grads = [np.zeros_like(query), np.zeros_like(key), np.zeros_like(value), np.zeros(heads)]
    for b, h in np.ndindex(batch, heads):
        bounds = [None if x is None else np.asarray(x)[b] for x in (starts, ends)]
        seen = visible(queries, key.shape[2], *bounds, **mask)
        used = seen.any(0)
        k, v = (np.where(used[:, None], x[b, h // group], 0) for x in (key, value))
        products = scale * query[b, h] @ k.T
        scores = products if softcap is None else softcap * np.tanh(products / softcap)
        scores = np.where(seen, scores, -np.inf)
        sink = -np.inf if sinks is None else f64(sinks)[h]
        with np.errstate(divide="ignore"):
            total = np.logaddexp(np.logaddexp.reduce(scores, axis=1), sink)
        finite = np.where(np.isfinite(total), total, 0)[:, None]
        weights = np.where(seen, np.exp(scores - finite), 0)
        out[b, h], log_sum[b, h] = weights @ v, total
        of_weights = grad[b, h] @ v.T
        delta = (grad[b, h] * out[b, h]).sum(1, keepdims=True)
        of_scores = weights * (of_weights - delta)
        if softcap is not None:
            of_scores *= 1 - np.tanh(products / softcap) ** 2
        grads[0][b, h] = scale * of_scores @ k
        grads[1][b, h // group] += scale * of_scores.T @ query[b, h]
        grads[2][b, h // group] += weights.T @ grad[b, h]
        if sinks is not None:
            grads[3][h] -= (np.exp(sink - finite) * delta).sum()
    return out, log_sum, grads if sinks is not None else grads[:3]


def attention_pass(
    *,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    dim: int,
    value_dim: int | None = None,
    batch: int = 1,
    starts=None,
    ends=None,
    sinks: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    **form: Any,
) -> Pass:
    """A pass whose keys and values that no query of a sequence sees are poisoned: NaN and inf."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal
    key, value = normal((batch, kv_heads, keys, dim)), normal((batch, kv_heads, keys, value_dim or dim))
    mask = {name: form[name] for name in ("causal", "window") if name in form}
    for b in range(batch):
        bounds = [None if x is None else np.asarray(x)[b] for x in (starts, ends)]
        unseen = ~visible(queries, keys, *bounds, **mask).any(0)
        key[b, :, unseen], value[b, :, unseen] = np.nan, np.inf
    operands = (
        jnp.asarray(normal((batch, heads, queries, dim)), dtype),
        jnp.asarray(key, dtype),
        jnp.asarray(value, dtype),
        None if starts is None else jnp.asarray(starts, jnp.int32),
        None if ends is None else jnp.asarray(ends, jnp.int32),
        jnp.asarray(normal(heads), dtype) if sinks else None,
    )
    grad = jnp.asarray(normal((batch, heads, queries, value_dim or dim)), dtype)
    return Pass(operands, {"scale": dim**-0.5, **form}, grad)
