"""Gated activations, SwiGLU, GeGLU and their kin, of floats and of quantised inputs."""

from __future__ import annotations

from . import layers
from .ops import act_and_mul, gated_activation

__all__ = ["act_and_mul", "gated_activation", "layers"]
