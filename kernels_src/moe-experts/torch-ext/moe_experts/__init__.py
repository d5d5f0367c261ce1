"""All experts of a mixture-of-experts layer in one call, for decode on TPUs."""

from __future__ import annotations

from .layers import experts_forward, use_mxfp4
from .ops import fused_experts
from .ragged_dot.ops import pack_mxfp4

__all__ = ["experts_forward", "fused_experts", "pack_mxfp4", "use_mxfp4"]
