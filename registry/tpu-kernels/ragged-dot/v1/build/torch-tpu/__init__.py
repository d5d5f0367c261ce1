"""Grouped matmul for mixture-of-experts models on TPUs."""

from __future__ import annotations

from .layers import experts_forward
from .ops import experts, pack_mxfp4, ragged_dot

__all__ = ["experts", "experts_forward", "pack_mxfp4", "ragged_dot"]
