"""Layers that take the place of transformers' norms; the model's module keeps its parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from .ops import rms_norm


class RMSNorm(torch.nn.Module):
    """The norm of Llama, Qwen3 and most others."""

    has_backward = True
    can_torch_compile = True

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, epsilon=self.variance_epsilon)


class RMSNormZeroCentered(torch.nn.Module):
    """The norm of Qwen3.5: its weight is a difference from one."""

    has_backward = True
    can_torch_compile = True

    weight: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, epsilon=self.eps, offset=1.0)
