"""All experts of a mixture-of-experts layer in one call, for decode on TPUs."""

from __future__ import annotations

from .layers import experts_forward
from .ops import fused_experts

__all__ = ["experts_forward", "fused_experts"]
