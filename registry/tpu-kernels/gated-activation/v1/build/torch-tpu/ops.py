"""The torch ops: what they take, what they give, what they cost."""

from __future__ import annotations

import torch
from torch import Tensor

from . import cases, kernel, reference
from .tpu_ops import Cost, InputError, op

DTYPES = (torch.bfloat16, torch.float32)


def _check(name: str, x: Tensor, scale: Tensor | None, activation: str) -> None:
    if activation not in reference.ACTIVATIONS:
        raise InputError(
            f"activation is {activation!r}; it must be one of {', '.join(reference.ACTIVATIONS)}"
        )
    if x.dim() == 0:
        raise InputError(f"{name} has no axis; its last one must be that of columns")
    if x.dtype not in (*DTYPES, torch.int8):
        raise InputError(f"{name} has dtype {x.dtype}; supported: bfloat16, float32, and int8 with a scale")
    if (scale is not None) != (x.dtype == torch.int8):
        raise InputError(
            f"{name} is {x.dtype} with {'no' if scale is None else 'a'} scale; int8 needs one, and only int8"
        )
    if scale is None:
        return
    by_row, by_column = (*x.shape[:-1], 1), (x.shape[-1],)
    if tuple(scale.shape) not in (by_row, by_column):
        raise InputError(
            f"{name}'s scale has shape {tuple(scale.shape)}; it must be {list(by_row)}, one a row, or "
            f"{list(by_column)}, one a column"
        )
    if scale.dtype not in DTYPES:
        raise InputError(f"{name}'s scale has dtype {scale.dtype}; supported: bfloat16 and float32")


def _bytes(*tensors: Tensor | None) -> int:
    return sum(each.numel() * each.dtype.itemsize for each in tensors if each is not None)


def _result(x: Tensor, scale: Tensor | None, columns: int) -> Tensor:
    return (x if scale is None else scale).new_empty((*x.shape[:-1], columns))


def _cost(
    gate: Tensor,
    up: Tensor,
    gate_scale: Tensor | None = None,
    up_scale: Tensor | None = None,
    *,
    activation: str = "silu",
) -> Cost:
    result = _result(gate, gate_scale, gate.shape[-1])
    return Cost(flops=5 * result.numel(), bytes=_bytes(gate, up, gate_scale, up_scale, result))


@op(
    kernel=kernel.gated_activation,
    reference=reference.gated_activation,
    differentiable=["gate", "up"],
    cost=_cost,
    cases=cases.benchmarks(),
)
def gated_activation(
    gate: Tensor,
    up: Tensor,
    gate_scale: Tensor | None = None,
    up_scale: Tensor | None = None,
    *,
    activation: str = "silu",
) -> Tensor:
    """``act(gate) * up``: SwiGLU with "silu", GeGLU with "gelu".

    Args:
      gate: [..., N], bfloat16 or float32; or int8, which `gate_scale` makes numbers of.
      up: the same shape and dtype.
      gate_scale, up_scale: of int8 inputs: [..., 1], one a row, or [N], one a column; bfloat16 or float32.
      activation: "silu", "gelu", "gelu_tanh", "relu" or "sigmoid".

    Returns: [..., N] in the dtype of `gate`, of int8 in that of its scale; computed in float32. Differentiable in
      `gate` and `up` where they are floats.

    Raises:
      InputError: shapes, dtypes, devices or settings do not fit.

    Example:
      >>> gated_activation(torch.tensor([-1.0, 3.0]), torch.tensor([5.0, 7.0]), activation="relu")
      tensor([ 0., 21.])
    """
    _check("gate", gate, gate_scale, activation)
    _check("up", up, up_scale, activation)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise InputError(
            f"gate is {gate.dtype} of shape {tuple(gate.shape)} and up {up.dtype} of shape {tuple(up.shape)}; both "
            "must be the same"
        )
    return _result(gate, gate_scale, gate.shape[-1])


def _concatenated_cost(x: Tensor, scale: Tensor | None = None, *, activation: str = "silu") -> Cost:
    result = _result(x, scale, x.shape[-1] // 2)
    return Cost(flops=5 * result.numel(), bytes=_bytes(x, scale, result))


@op(
    kernel=kernel.act_and_mul,
    reference=reference.act_and_mul,
    differentiable=["x"],
    cost=_concatenated_cost,
    cases=cases.benchmarks(),
)
def act_and_mul(x: Tensor, scale: Tensor | None = None, *, activation: str = "silu") -> Tensor:
    """`gated_activation` where gate and up are the halves of one tensor, as one matrix multiplication gives them.

    Args:
      x: [..., 2N], bfloat16 or float32, or int8 with a scale: gate, then up.
      scale: of int8: [..., 1], one a row, or [2N], one a column; bfloat16 or float32.
      activation: as in `gated_activation`.

    Returns: [..., N] in the dtype of `x`, of int8 in that of the scale; computed in float32. Differentiable in `x`.

    Raises:
      InputError: shapes, dtypes, devices or settings do not fit.

    Example:
      >>> act_and_mul(torch.tensor([-1.0, 3.0, 5.0, 7.0]), activation="relu")
      tensor([ 0., 21.])
    """
    _check("x", x, scale, activation)
    if x.shape[-1] % 2:
        raise InputError(f"x has {x.shape[-1]} columns; gate and up need the same number of them")
    return _result(x, scale, x.shape[-1] // 2)
