"""The torch op: what it takes, what it gives, what it costs."""

from __future__ import annotations

import torch
from torch import Tensor

from . import cases, kernel, reference
from .tpu_ops import Cost, InputError, op

DTYPES = (torch.bfloat16, torch.float32)


def _cost(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False) -> Cost:
    size = 2 * query.numel() + key.numel() + value.numel()
    flops = 4 * query.numel() * key.shape[2]
    return Cost(flops=flops // 2 if causal else flops, bytes=size * query.dtype.itemsize)


@op(
    kernel=kernel.attention,
    reference=reference.attention,
    differentiable=["query", "key", "value"],
    cost=_cost,
    cases=cases.benchmarks(),
)
def attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False) -> Tensor:
    """Attention of query heads over the heads of keys that they share.

    Args:
      query: [B, H, L, D], bfloat16 or float32; H is a multiple of G.
      key, value: [B, G, S, D], the dtype of `query`, with 1 <= S <= 4096 and D <= 256.
      causal: the last query sees all keys, each one before it one less; then L is at most S.

    Returns: [B, H, L, D] in the dtype of `query`; softmax and sums are in float32. Differentiable in all three.

    Raises:
      InputError: shapes, dtypes or devices do not fit.

    Example:
      >>> x = torch.ones(1, 2, 3, 4)
      >>> attention(x, x, x)[0, 0, 0, 0]
      tensor(1.)
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise InputError(f"{name} has shape {tuple(tensor.shape)}; it must have 4 axes")
        if tensor.dtype not in DTYPES or tensor.dtype != query.dtype:
            raise InputError(f"{name} is {tensor.dtype}; all must be bfloat16, or all float32")
    sequences, heads, queries, dim = query.shape
    groups, keys = key.shape[1:3]
    if key.shape != value.shape or (key.shape[0], key.shape[3]) != (sequences, dim):
        raise InputError(
            f"key has shape {tuple(key.shape)} and value {tuple(value.shape)}; for this query both must be "
            f"[{sequences}, G, S, {dim}]"
        )
    if groups == 0 or heads % groups:
        raise InputError(f"query has {heads} heads, which is no multiple of the key's {groups}")
    if not 1 <= keys <= kernel.MOST_KEYS or not 1 <= dim <= kernel.MOST_DIM:
        raise InputError(
            f"key has {keys} keys of {dim} dimensions; 1 to {kernel.MOST_KEYS} of up to {kernel.MOST_DIM} are supported"
        )
    if causal and queries > keys:
        raise InputError(
            f"query has {queries} queries, more than the {keys} keys; causal ones would see none"
        )
    return torch.empty_like(query, memory_format=torch.contiguous_format)
