"""The torch op: what it takes, what it gives, what it costs."""

from __future__ import annotations

import torch
from torch import Tensor

from . import cases, kernel, reference
from .tpu_ops import Cost, InputError, op

DTYPES = (torch.bfloat16, torch.float32)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> None:
    if unsqueeze_dim not in (1, 2):
        raise InputError(
            f"unsqueeze_dim is {unsqueeze_dim}; it must be 1, for [B, H, S, D], or 2, for [B, S, H, D]"
        )
    for name, tensor in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        if tensor.dtype not in DTYPES:
            raise InputError(f"{name} has dtype {tensor.dtype}; supported: bfloat16 and float32")
    if (
        q.dim() != 4
        or k.dim() != 4
        or q.dtype != k.dtype
        or _without_heads(q, unsqueeze_dim) != _without_heads(k, unsqueeze_dim)
    ):
        raise InputError(
            f"q is {q.dtype} of shape {tuple(q.shape)} and k {k.dtype} of shape {tuple(k.shape)}; both must have four "
            f"axes and be the same but for axis {unsqueeze_dim}, their heads"
        )
    batch, tokens, width = _without_heads(q, unsqueeze_dim)
    heads = [x.shape[unsqueeze_dim] for x in (q, k)]
    if min(heads) == 0 or sum(heads) * width > kernel.MOST_ELEMENTS:
        raise InputError(
            f"q and k have {heads[0]} and {heads[1]} heads of {width} elements; each must have one at least, and both "
            f"together up to {kernel.MOST_ELEMENTS} elements a token"
        )
    if (
        cos.dim() != 3
        or cos.shape != sin.shape
        or cos.shape[0] not in (1, batch)
        or cos.shape[1] != tokens
        or cos.shape[2] % 2
        or not 2 <= cos.shape[2] <= width
    ):
        raise InputError(
            f"cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)}; for this q both must be [{batch} or 1, "
            f"{tokens}, R] with an even R from 2 to {width}"
        )


def _without_heads(x: Tensor, unsqueeze_dim: int) -> tuple[int, ...]:
    """B, S and D."""
    return tuple(size for axis, size in enumerate(x.shape) if axis != unsqueeze_dim)


def _cost(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, unsqueeze_dim: int = 1) -> Cost:
    tensors = (q, q, k, k, cos, sin)
    return Cost(
        flops=3 * (q.numel() + k.numel()), bytes=sum(each.numel() * each.dtype.itemsize for each in tensors)
    )


@op(
    kernel=kernel.rotary,
    reference=reference.rotary,
    differentiable=["q", "k"],
    cost=_cost,
    cases=cases.benchmarks(),
)
def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by their tokens' positions.

    Args:
      q: [B, H, S, D], bfloat16 or float32; [B, S, H, D] if `unsqueeze_dim` is 2.
      k: the same, with a number of heads of its own. All heads of a token have up to 24576 elements.
      cos, sin: [B, S, R] or [1, S, R], bfloat16 or float32. The first R elements of a head are rotated, that at place
        ``i < R / 2`` together with that at ``i + R / 2``; R is even. The others stay.
      unsqueeze_dim: the axis of heads, which the tables lack.

    Returns: both rotated, in the shapes and dtype of `q` and `k`; computed in float32. Differentiable in `q` and `k`.

    Raises:
      InputError: shapes, dtypes or devices do not fit.

    Example:
      >>> q = torch.tensor([1.0, 2.0, 5.0]).reshape(1, 1, 1, 3)
      >>> rotary(q, q, torch.zeros(1, 1, 2), torch.ones(1, 1, 2))[0]  # a quarter turn of the first two
      tensor([[[[-2.,  1.,  5.]]]])
    """
    _check(q, k, cos, sin, unsqueeze_dim)
    like = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in (q, k)]
    return like[0], like[1]
