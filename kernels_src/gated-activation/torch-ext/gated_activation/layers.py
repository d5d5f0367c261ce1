"""Layers without parameters, of inputs whose halves are gate and up; named as in `kernels-community/activation`."""

from __future__ import annotations

import torch
from torch import Tensor

from .ops import act_and_mul


class SiluAndMul(torch.nn.Module):
    """SwiGLU."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        return act_and_mul(x, activation="silu")


class GeluAndMul(torch.nn.Module):
    """GeGLU."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        return act_and_mul(x, activation="gelu")


class GeluTanhAndMul(torch.nn.Module):
    """GeGLU with the tanh approximation."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        return act_and_mul(x, activation="gelu_tanh")
