"""The torch ops: what they take, what they give, what they cost."""

from __future__ import annotations

import torch
from torch import Tensor

from . import cases, kernel, reference
from .tpu_ops import Cost, InputError, op

DTYPES = (torch.bfloat16, torch.float32)


def _check(x: Tensor, weight: Tensor) -> None:
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype not in DTYPES:
            raise InputError(f"{name} has dtype {tensor.dtype}; supported: bfloat16 and float32")
    if x.dim() == 0 or not 1 <= x.shape[-1] <= kernel.MOST_COLUMNS:
        raise InputError(
            f"x has shape {tuple(x.shape)}; it must be [..., N] with N from 1 to {kernel.MOST_COLUMNS}"
        )
    if tuple(weight.shape) != (x.shape[-1],):
        raise InputError(f"weight has shape {tuple(weight.shape)}; for this x it must be [{x.shape[-1]}]")


def _cost(x: Tensor, weight: Tensor, *, epsilon: float = 1e-6, offset: float = 0.0) -> Cost:
    return Cost(flops=4 * x.numel(), bytes=2 * x.numel() * x.dtype.itemsize)


@op(
    kernel=kernel.rms_norm,
    reference=reference.rms_norm,
    differentiable=["x", "weight"],
    cost=_cost,
    cases=cases.benchmarks(),
)
def rms_norm(x: Tensor, weight: Tensor, *, epsilon: float = 1e-6, offset: float = 0.0) -> Tensor:
    """Normalises rows by their root mean square.

    Args:
      x: [..., N], bfloat16 or float32, N of up to 8192.
      weight: [N], bfloat16 or float32.
      epsilon: is added to the mean of the squares.
      offset: is added to the weight: 1 for zero-centred ones.

    Returns: [..., N] in the dtype of `x`; computed in float32. Differentiable in both.

    Raises:
      InputError: shapes, dtypes or devices do not fit.

    Example:
      >>> rms_norm(torch.full((1, 4), 3.0), torch.ones(4))
      tensor([[1., 1., 1., 1.]])
    """
    _check(x, weight)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _add_cost(
    x: Tensor, residual: Tensor, weight: Tensor, *, epsilon: float = 1e-6, offset: float = 0.0
) -> Cost:
    return Cost(flops=5 * x.numel(), bytes=4 * x.numel() * x.dtype.itemsize)


@op(
    kernel=kernel.add_rms_norm,
    reference=reference.add_rms_norm,
    differentiable=["x", "residual", "weight"],
    cost=_add_cost,
    cases=cases.benchmarks(),
)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, epsilon: float = 1e-6, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The norm of a sum, and the sum, in one pass over memory.

    Args:
      x, residual: [..., N], bfloat16 or float32, both the same; N of up to 8192.
      weight: [N], bfloat16 or float32.
      epsilon, offset: as in `rms_norm`.

    Returns: the norm of ``x + residual``, and that sum, both [..., N] in the dtype of `x`. Differentiable in all three.

    Raises:
      InputError: shapes, dtypes or devices do not fit.

    Example:
      >>> normed, total = add_rms_norm(torch.ones(1, 4), 2 * torch.ones(1, 4), torch.ones(4))
      >>> total
      tensor([[3., 3., 3., 3.]])
    """
    _check(x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise InputError(
            f"x is {x.dtype} of shape {tuple(x.shape)} and residual {residual.dtype} of shape "
            f"{tuple(residual.shape)}; both must be the same"
        )
    like = torch.empty_like(x, memory_format=torch.contiguous_format)
    return like, torch.empty_like(like)
