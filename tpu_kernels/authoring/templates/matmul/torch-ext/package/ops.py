"""The torch op: what it takes, what it gives, what it costs."""

from __future__ import annotations

import torch
from torch import Tensor

from . import cases, kernel, reference
from .tpu_ops import Cost, InputError, op

DTYPES = (torch.bfloat16, torch.float32)


def _cost(lhs: Tensor, rhs: Tensor) -> Cost:
    (m, k), n = lhs.shape, rhs.shape[1]
    return Cost(flops=2 * m * k * n, bytes=(m * k + k * n + m * n) * lhs.dtype.itemsize)


@op(
    kernel=kernel.matmul,
    reference=reference.matmul,
    differentiable=["lhs", "rhs"],
    cost=_cost,
    cases=cases.benchmarks(),
)
def matmul(lhs: Tensor, rhs: Tensor) -> Tensor:
    """Matrix product, ``lhs @ rhs``.

    Args:
      lhs: [M, K], bfloat16 or float32.
      rhs: [K, N], the dtype of `lhs`.

    Returns: [M, N] in the dtype of `lhs`; sums are kept in float32. Differentiable in both.

    Raises:
      InputError: shapes, dtypes or devices do not fit.

    Example:
      >>> matmul(torch.ones(2, 3), torch.ones(3, 4)).sum()
      tensor(24.)
    """
    if lhs.dtype not in DTYPES or rhs.dtype != lhs.dtype:
        raise InputError(f"lhs is {lhs.dtype} and rhs {rhs.dtype}; both must be bfloat16, or both float32")
    if lhs.dim() != 2 or rhs.dim() != 2 or lhs.shape[1] != rhs.shape[0]:
        raise InputError(
            f"lhs has shape {tuple(lhs.shape)} and rhs {tuple(rhs.shape)}; they must be [M, K] and [K, N]"
        )
    return lhs.new_empty((lhs.shape[0], rhs.shape[1]))
