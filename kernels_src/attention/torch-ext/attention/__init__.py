"""Attention of decode steps over a static key/value cache, for TPUs."""

from __future__ import annotations

from .layers import attention_forward, attention_mask
from .ops import decode_attention

__all__ = ["attention_forward", "attention_mask", "decode_attention"]
