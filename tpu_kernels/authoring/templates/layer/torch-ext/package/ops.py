"""The torch op: what it takes, what it gives, what it costs."""

from __future__ import annotations

import torch
from torch import Tensor

from . import cases, kernel, reference
from .tpu_ops import Cost, InputError, op

DTYPES = (torch.bfloat16, torch.float32)


def _cost(x: Tensor, weight: Tensor, *, epsilon: float = 1e-6) -> Cost:
    return Cost(flops=4 * x.numel(), bytes=2 * x.numel() * x.dtype.itemsize)


@op(
    kernel=kernel.rms_norm,
    reference=reference.rms_norm,
    differentiable=["x", "weight"],
    cost=_cost,
    cases=cases.benchmarks(),
)
def rms_norm(x: Tensor, weight: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """Normalises rows by their root mean square.

    Args:
      x: [..., N], bfloat16 or float32, N of up to 8192.
      weight: [N], bfloat16 or float32.
      epsilon: is added to the mean of the squares.

    Returns: [..., N] in the dtype of `x`; computed in float32. Differentiable in both.

    Raises:
      InputError: shapes, dtypes or devices do not fit.

    Example:
      >>> rms_norm(torch.full((1, 4), 3.0), torch.ones(4))
      tensor([[1., 1., 1., 1.]])
    """
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype not in DTYPES:
            raise InputError(f"{name} has dtype {tensor.dtype}; supported: bfloat16 and float32")
    if x.dim() == 0 or not 1 <= x.shape[-1] <= kernel.MOST_COLUMNS:
        raise InputError(
            f"x has shape {tuple(x.shape)}; it must be [..., N] with N from 1 to {kernel.MOST_COLUMNS}"
        )
    if tuple(weight.shape) != (x.shape[-1],):
        raise InputError(f"weight has shape {tuple(weight.shape)}; for this x it must be [{x.shape[-1]}]")
    return torch.empty_like(x, memory_format=torch.contiguous_format)
