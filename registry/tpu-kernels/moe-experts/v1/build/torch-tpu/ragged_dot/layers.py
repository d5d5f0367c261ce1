"""`experts_forward`: these ops as the experts function of a transformers model.

A module that transformers' ``use_experts_implementation`` has decorated says by flags how its experts work.
Three paths serve them all:

- *fused*: one `experts` op, for gated experts without bias, norm or a gate function of their own;
- *composed*: two `ragged_dot` ops, and between them the module's own gate, biases and norm;
- *own*: the model's own code, for what neither can do.

Which one a module gets is a property of the module, not of its inputs, and is told by `explain`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import torch
from torch import Tensor

from .ops import DTYPES, experts, ragged_dot

_logger = logging.getLogger("tpu_kernels.ragged_dot")


@dataclasses.dataclass(frozen=True)
class Path:
    """How a module's experts are computed.

    Attributes:
      name: "fused", "composed" or "own".
      reason: why not a faster one; empty for the fastest.
      activation: of the fused path.
    """

    name: str
    reason: str = ""
    activation: str = ""


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """An experts function for transformers: the experts of `self`, with this kernel's ops.

    Args:
      self: a module whose class ``use_experts_implementation`` has decorated.
      hidden_states: [T, H]. top_k_index: [T, k] int64. top_k_weights: [T, k], bfloat16 or float32.

    Returns: [T, H] in the dtype of `hidden_states`.

    Example:
      >>> from transformers.integrations.moe import ExpertsInterface  # doctest: +SKIP
      >>> ExpertsInterface.register("tpu_ragged_dot", experts_forward)  # doctest: +SKIP
    """
    path = explain(self)
    if path.name == "fused":
        return experts(
            hidden_states.to(self.gate_up_proj.dtype),
            top_k_index,
            top_k_weights,
            self.gate_up_proj,
            self.down_proj,
            activation=path.activation,
            transposed=self.is_transposed,
        ).to(hidden_states.dtype)
    if not torch.compiler.is_compiling():
        _log_once(type(self).__name__, path.name, path.reason)
    if path.name == "composed":
        return _composed(self, hidden_states, top_k_index, top_k_weights)
    return type(self).forward.__wrapped__(self, hidden_states, top_k_index, top_k_weights)


@functools.cache
def _log_once(module: str, path: str, reason: str) -> None:
    _logger.info("%s runs the %s path: %s", module, path, reason)


def explain(module: Any) -> Path:
    """Which path the experts of `module` take, and why.

    Example:
      >>> explain(model.model.layers[0].mlp.experts)  # doctest: +SKIP
      Path(name='fused', reason='', activation='silu')
    """
    weights = [
        weight
        for name in ("gate_up_proj", "up_proj", "down_proj")
        if isinstance(weight := getattr(module, name, None), Tensor)
    ]
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    missing = [name for name in names if not isinstance(getattr(module, name, None), Tensor)]
    if missing:
        return Path("own", f"it has no tensor {' and no '.join(missing)}")
    odd = next((w for w in weights if w.dim() != 3 or w.dtype not in DTYPES), None)
    if odd is not None:
        return Path(
            "own", f"its weights are {odd.dtype} with {odd.dim()} axes, not bfloat16 or float32 with 3"
        )
    if not module.has_gate:
        return Path("composed", "its experts have no gate")
    if module.has_bias:
        return Path("composed", "its experts have biases")
    if module.has_post_expert_norm:
        return Path("composed", "its experts end in a norm")
    if not module.is_concatenated:
        return Path("composed", "its gate and up columns are interleaved")
    if type(module)._apply_gate.__module__ != "transformers.integrations.moe":
        return Path("composed", "it has a gate function of its own")
    activation = _activation(module.act_fn)
    if activation is None:
        return Path("composed", f"its activation is {type(module.act_fn).__name__}")
    return Path("fused", activation=activation)


# By module and class: another library's class of the same name may compute something else.
ACTIVATION_NAMES = {
    ("transformers.activations", "SiLUActivation"): "silu",
    ("torch.nn.modules.activation", "SiLU"): "silu",
    ("transformers.activations", "GELUActivation"): "gelu",
    ("transformers.activations", "GELUTanh"): "gelu_tanh",
    ("transformers.activations", "PytorchGELUTanh"): "gelu_tanh",
    ("torch.nn.modules.activation", "ReLU"): "relu",
}


def _activation(function: Any) -> str | None:
    """Our name of an activation module, or None where it is not one of ours."""
    return ACTIVATION_NAMES.get((type(function).__module__, type(function).__name__))


class _Permute(torch.autograd.Function):
    """``x[order]`` for a permutation; its gradient is the gather ``grad[inverse]``, where torch has a scatter-add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


def _composed(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    tokens, choices = top_k_index.shape
    hidden = hidden_states.shape[1]
    into = self.gate_up_proj if self.has_gate else self.up_proj
    count = into.shape[0]
    expert = top_k_index.reshape(-1)
    # Sentinels of expert parallelism (an index of `count` or more) sort last and are in no group.
    order = torch.argsort(expert, stable=True)
    inverse = torch.argsort(order)
    group_sizes = (expert.unsqueeze(1) == torch.arange(count, device=expert.device)).sum(0, dtype=torch.int32)
    outside = (expert[order] >= count).unsqueeze(1)

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return ragged_dot(
            rows.to(weight.dtype), weight, group_sizes, bias=bias, transpose_rhs=not self.is_transposed
        )

    name = "gate_up_proj" if self.has_gate else "up_proj"
    pairs = hidden_states.unsqueeze(1).expand(-1, choices, -1).reshape(tokens * choices, hidden)
    rows = _Permute.apply(pairs, order, inverse)
    rows = linear(rows, into, getattr(self, f"{name}_bias") if self.has_bias else None)
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    rows = linear(rows, self.down_proj, self.down_proj_bias if self.has_bias else None)
    if self.has_post_expert_norm:
        rows = self.post_expert_norm(rows)
    # Gates and norms may turn the zeros of a sentinel's row into anything.
    rows = _Permute.apply(rows.masked_fill(outside, 0.0), inverse, order).reshape(tokens, choices, hidden)
    return (rows * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)


experts_forward.explain = explain  # type: ignore[attr-defined]
