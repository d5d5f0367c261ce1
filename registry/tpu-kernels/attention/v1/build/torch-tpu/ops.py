"""The torch ops `decode_attention`, `append_attention` and `flash_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from . import flash, functions, reference
from .cases import CASES
from .shapes import visible_pairs
from .tpu_ops import Cost, InputError, op

DTYPES = (torch.bfloat16, torch.float32)
INDICES = (torch.int32, torch.int64)
# With more new tokens of a sequence it is no decode step, which lives by reading the cache once.
MOST_NEW = 8


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)


def _check_shared(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    window: int | None,
    softcap: float | None,
) -> None:
    """What all ops ask of the arguments that they share."""
    for name, tensor, axes in (
        ("query", query, "[B, Hq, L, D]"),
        ("key", key, "[B, H, S, D]"),
        ("value", value, "[B, H, S, E]"),
    ):
        _check(tensor.dim() == 4, f"{name} has shape {tuple(tensor.shape)}; it must have 4 axes, {axes}")
        _check(tensor.dtype in DTYPES, f"{name} has dtype {tensor.dtype}; supported: bfloat16 and float32")
        _check(
            tensor.dtype == query.dtype,
            f"query is {query.dtype} and {name} is {tensor.dtype}; both must be the same",
        )
    sequences, heads, _, dim = query.shape
    kv_heads, keys = key.shape[1:3]
    _check(
        (key.shape[0], key.shape[3]) == (sequences, dim),
        f"key has shape {tuple(key.shape)}; for this query it must be [{sequences}, H, S, {dim}]",
    )
    _check(
        tuple(value.shape[:3]) == tuple(key.shape[:3]),
        f"value has shape {tuple(value.shape)}; for this key it must be [{sequences}, {kv_heads}, {keys}, E]",
    )
    _check(dim >= 1, f"query has shape {tuple(query.shape)}; its heads must have at least 1 dimension")
    _check(
        0 < kv_heads <= heads and heads % kv_heads == 0,
        f"query has {heads} heads, which is no multiple of the key's {kv_heads}",
    )
    if sinks is not None:
        _check(
            tuple(sinks.shape) == (heads,),
            f"sinks has shape {tuple(sinks.shape)}; it must be [Hq] = [{heads}]",
        )
        _check(sinks.dtype in DTYPES, f"sinks has dtype {sinks.dtype}; supported: bfloat16 and float32")
    _check(window is None or window >= 1, f"window is {window}; it must be at least 1, or None for no window")
    _check(softcap is None or softcap > 0, f"softcap is {softcap}; it must be above 0, or None for no cap")


def _check_indices(name: str, indices: Tensor) -> None:
    _check(indices.dtype in INDICES, f"{name} has dtype {indices.dtype}; it must be int32 or int64")


def _check_places(query: Tensor, **given: Tensor | None) -> None:
    sequences, _, new, _ = query.shape
    for name, places in given.items():
        if places is None:
            continue
        _check_indices(name, places)
        _check(
            tuple(places.shape) in ((sequences,), (sequences, new)),
            f"{name} has shape {tuple(places.shape)}; it must be [B] = [{sequences}] or [B, L] = "
            f"[{sequences}, {new}]",
        )


def _cost(
    query: Tensor, key: Tensor, value: Tensor | None, *others: object, causal: bool = False, **form: object
) -> Cost:
    sequences, heads, queries, dim = query.shape
    window = form.get("window") if causal else None
    assert window is None or isinstance(window, int)
    pairs = sequences * heads * visible_pairs(queries, key.shape[2], causal, window)
    moved = sum(each.numel() * each.dtype.itemsize for each in (query, key, value) if each is not None)
    value_dim = (key if value is None else value).shape[3]
    result = sequences * heads * queries * value_dim * query.dtype.itemsize
    return Cost(flops=2 * pairs * (dim + value_dim), bytes=moved + result)


def _append_cost(
    query: Tensor,
    new_key: Tensor,
    new_value: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    *others: object,
    **form: object,
) -> Cost:
    cost = _cost(query, key, value)
    new = sum(each.numel() * each.dtype.itemsize for each in (new_key, new_value) if each is not None)
    return Cost(cost.flops, cost.bytes + 2 * new)


def _check_step(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sinks: Tensor | None,
    window: int | None,
    softcap: float | None,
    **places: Tensor | None,
) -> Tensor:
    """What both ops of a decode step ask; returns what the result looks like."""
    values = key if value is None else value
    _check_shared(query, key, values, sinks, window, softcap)
    new = query.shape[2]
    _check(
        1 <= new <= MOST_NEW,
        f"query has {new} new tokens a sequence; 1 to {MOST_NEW} are supported: for more use flash_attention",
    )
    _check_places(query, **places)
    return query.new_empty((*query.shape[:3], values.shape[3]))


@op(
    kernel=functions.decode_attention,
    reference=reference.decode_attention,
    differentiable=["query", "key", "value", "sinks"],
    cost=_cost,
    cases=CASES,
)
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    lengths: Tensor,
    starts: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of the L newest tokens of each sequence over its part of a static key/value cache.

    One kernel call, which reads the keys and values that some token sees and nothing else of the cache; query heads
    that share a kv head are computed together.

    Args:
      query: [B, Hq, L, D], bfloat16 or float32, with 1 <= L <= 8.
      key: [B, H, S, D] with H a divisor of Hq, the cache as transformers keeps it; the new tokens' keys are in it.
      value: [B, H, S, E]; None where the keys are the values, which are then read once.
      lengths: [B] int32 or int64, valid keys of each sequence: its newest token sees keys below that, the one before
        it one key less; or [B, L], the end of the keys that each new token sees. More than S counts as S.
      starts: [B] or [B, L], the first key that a sequence, or a new token, sees: left padding.
      sinks: [Hq], the score of a key without value that each query head sees beside the others.
      scale: factor of the scores; unless given 1 / sqrt(D).
      window: a token sees at most so many keys, the newest.
      softcap: scores x become ``softcap * tanh(x / softcap)``.

    Returns: [B, Hq, L, E] in the dtype of `query`; zeros for a token that sees no key. Sums are kept in float32.
      Differentiable in the floats, through an ordinary attention over the whole cache.

    Raises:
      InputError: shapes, dtypes or devices do not fit, or a number is out of its range.

    Example:
      >>> query, cache = torch.ones(1, 4, 1, 64), torch.ones(1, 2, 32, 64)
      >>> decode_attention(query, cache, cache, torch.tensor([5]))[0, 0, 0, 0]
      tensor(1.)
    """
    return _check_step(query, key, value, sinks, window, softcap, lengths=lengths, starts=starts)


@op(
    kernel=functions.append_attention,
    reference=reference.append_attention,
    cost=_append_cost,
    cases=CASES,
)
def append_attention(
    query: Tensor,
    new_key: Tensor,
    new_value: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    lengths: Tensor,
    places: Tensor | None = None,
    starts: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> list[Tensor]:
    """`decode_attention` that puts the new tokens' keys and values into the cache in the same kernel call.

    The caches come back as results. In a compiled step that copies them to where they were, ``key.copy_(...)``, with
    the caches donated (`tpu_kernels.generate` does), the kernel writes in place: only the tiles touched, and nothing is
    copied. Elsewhere, as in eager calls, each call makes new caches.

    Args:
      query: [B, Hq, L, D], bfloat16 or float32, with 1 <= L <= 8.
      new_key: [B, H, L, D]. new_value: [B, H, L, E], or None with `value`.
      key: [B, H, S, D], the cache; what is in the new tokens' places does not matter.
      value: [B, H, S, E], or None where the keys are the values.
      lengths: as in `decode_attention`: the new tokens are counted.
      places: [B] int32 or int64, where the first of a sequence's new keys goes; the others follow it. Unless given,
        L before the end of the keys that it sees. For a rolled cache its position modulo S, with L = 1. A key that no
        new token sees is not written: none of a sequence of length 0.
      starts, sinks, scale, window, softcap: as in `decode_attention`.

    Returns: [B, Hq, L, E], the key cache, and unless the keys are the values the value cache. There is no gradient.

    Raises:
      InputError: shapes, dtypes or devices do not fit, or a number is out of its range.

    Example:
      >>> query, new, cache = torch.ones(1, 4, 1, 64), torch.ones(1, 2, 1, 64), torch.zeros(1, 2, 32, 64)
      >>> out, key, value = append_attention(query, new, new, cache, cache, torch.tensor([5]))
      >>> key[0, 0, :, 0].nonzero()
      tensor([[4]])
    """
    result = _check_step(query, key, value, sinks, window, softcap, lengths=lengths, starts=starts)
    _check(
        (new_value is None) == (value is None),
        "new_value and value must both be given, or both be None where the keys are the values",
    )
    for name, new, cache in (("key", new_key, key), ("value", new_value, value)):
        if new is None or cache is None:
            continue
        shape = (*cache.shape[:2], query.shape[2], cache.shape[3])
        _check(
            tuple(new.shape) == shape, f"new_{name} has shape {tuple(new.shape)}; it must be {list(shape)}"
        )
        _check(new.dtype == cache.dtype, f"new_{name} is {new.dtype} and {name} is {cache.dtype}")
    if places is not None:
        _check_indices("places", places)
        _check(
            tuple(places.shape) == (query.shape[0],),
            f"places has shape {tuple(places.shape)}; it must be [B] = [{query.shape[0]}]",
        )
    caches = [key] if value is None else [key, value]
    return [result, *(cache.new_empty(cache.shape) for cache in caches)]


@op(
    kernel=flash.flash_attention,
    reference=reference.flash_attention,
    differentiable=["query", "key", "value", "sinks"],
    gradient=flash.gradient,
    cost=_cost,
    cases=CASES,
)
def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of L queries over S keys: prefill, training, cross attention, diffusion.

    One kernel call, and one for the gradient. Each query sees one run of keys, which causality, a window, padding on
    either side (`starts`, `ends`) and packed sequences (`starts` of each query) come to; tiles that no query of a
    block sees are neither read nor computed. Query heads that share a kv head do so without repeating it.

    Args:
      query: [B, Hq, L, D], bfloat16 or float32.
      key: [B, H, S, D] with H a divisor of Hq. value: [B, H, S, E].
      starts: [B] or [B, L] int32 or int64, the first key that a sequence, or a query, sees.
      ends: [B] or [B, L], the end of the keys that a sequence, or a query, sees. More than S counts as S.
      sinks: [Hq], the score of a key without value that each query head sees beside the others.
      scale: factor of the scores; unless given 1 / sqrt(D).
      causal: query i sees keys up to S - L + i: the queries are the newest L of S tokens.
      window: with `causal`, only the newest so many of them.
      softcap: scores x become ``softcap * tanh(x / softcap)``.

    Returns: [B, Hq, L, E] in the dtype of `query`, zeros for a query that sees no key; and the log-sum-exp of each
      query's scores, float32 [B, Hq, L], -inf for a query that sees no key. Sums are kept in float32. Both are
      differentiable in query, key, value and sinks.

    Raises:
      InputError: shapes, dtypes or devices do not fit, or a number is out of its range.

    Example:
      >>> query, keys = torch.ones(1, 4, 8, 64), torch.ones(1, 2, 8, 64)
      >>> out, log_sum = flash_attention(query, keys, keys, causal=True)
      >>> out.shape, log_sum.shape
      (torch.Size([1, 4, 8, 64]), torch.Size([1, 4, 8]))
    """
    _check_shared(query, key, value, sinks, window, softcap)
    _check_places(query, starts=starts, ends=ends)
    _check(window is None or causal, f"window is {window} without causal=True; give starts and ends instead")
    return (
        query.new_empty((*query.shape[:3], value.shape[3])),
        query.new_empty(query.shape[:3], dtype=torch.float32),
    )
