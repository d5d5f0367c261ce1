"""The torch op: what it takes, what it gives, what it costs."""

from __future__ import annotations

import torch
from torch import Tensor

from . import cases, kernel, reference
from .tpu_ops import Cost, InputError, op

DTYPES = (torch.bfloat16, torch.float32)


def _cost(gate: Tensor, up: Tensor) -> Cost:
    return Cost(flops=5 * gate.numel(), bytes=3 * gate.numel() * gate.dtype.itemsize)


@op(
    kernel=kernel.swiglu,
    reference=reference.swiglu,
    differentiable=["gate", "up"],
    cost=_cost,
    cases=cases.benchmarks(),
)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Gated SiLU, ``silu(gate) * up``.

    Args:
      gate: [..., N], bfloat16 or float32.
      up: the same shape and dtype.

    Returns: [..., N] in the dtype of `gate`; computed in float32. Differentiable in both.

    Raises:
      InputError: shapes, dtypes or devices do not fit.

    Example:
      >>> swiglu(torch.zeros(2, 3), torch.ones(2, 3)).sum()
      tensor(0.)
    """
    if gate.dtype not in DTYPES:
        raise InputError(f"gate has dtype {gate.dtype}; supported: bfloat16 and float32")
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise InputError(
            f"gate is {gate.dtype} of shape {tuple(gate.shape)} and up {up.dtype} of shape {tuple(up.shape)}; both "
            "must be the same"
        )
    return torch.empty_like(gate, memory_format=torch.contiguous_format)
