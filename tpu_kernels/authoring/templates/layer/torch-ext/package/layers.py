"""Layers that take the place of a model's own; the model's module keeps its parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from .ops import rms_norm


class RMSNorm(torch.nn.Module):
    """RMSNorm of modules with a `weight` and a `variance_epsilon`, as Llama's in transformers."""

    has_backward = True
    can_torch_compile = True

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, epsilon=self.variance_epsilon)
