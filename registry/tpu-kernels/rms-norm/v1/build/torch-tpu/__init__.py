"""RMSNorm, plain and zero-centred, alone and fused with the residual sum before it."""

from __future__ import annotations

from . import layers
from .ops import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "layers", "rms_norm"]
