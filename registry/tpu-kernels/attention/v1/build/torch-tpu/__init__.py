"""Attention for TPUs: decode steps over a static key/value cache, prefill and training."""

from __future__ import annotations

from .diffusion import dispatched_attention
from .layers import attention_forward, attention_mask, flash_attn_forward, supports_flash_attn
from .ops import append_attention, decode_attention, flash_attention

__all__ = [
    "append_attention",
    "attention_forward",
    "attention_mask",
    "decode_attention",
    "dispatched_attention",
    "flash_attention",
    "flash_attn_forward",
    "supports_flash_attn",
]
