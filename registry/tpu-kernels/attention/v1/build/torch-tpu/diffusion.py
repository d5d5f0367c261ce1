"""`dispatched_attention`: `flash_attention` as a backend of diffusers' attention dispatcher."""

from __future__ import annotations

import torch
from torch import Tensor

from .layers import log_once
from .ops import DTYPES, flash_attention


def dispatched_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """An attention backend for diffusers.

    A mask of keys may have gaps, as between a padded text and an image: the keys that it lets through are put first.
    Masks that differ between queries or heads, masks to be added and dropout take scaled_dot_product_attention, logged
    once with the reason. The kernel has heads before tokens: XLA transposes its operands and result.

    Args:
      query: [B, L, Hq, D]. key: [B, S, H, D]. value: [B, S, H, E].
      attn_mask: bool, True where a key is seen, [B, S] or what broadcasts to [B, Hq, L, S]; or added to the scores.
      dropout_p, is_causal, scale, enable_gqa: as in scaled_dot_product_attention.

    Returns: [B, L, Hq, E].
    """
    if attn_mask is not None and attn_mask.dim() == 2:
        attn_mask = attn_mask[:, None, None]
    reason = _not_served(query, key, value, attn_mask, dropout_p, is_causal)
    if reason is not None:
        if not torch.compiler.is_compiling():
            log_once("diffusers' dispatcher", reason)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return out.transpose(1, 2)
    ends = None
    if attn_mask is not None:
        seen = attn_mask[:, 0, 0].expand(key.shape[:2])
        first = torch.argsort((~seen).to(torch.int32), dim=1, stable=True)[..., None, None]
        key, value = (torch.gather(x, 1, first.expand(x.shape)) for x in (key, value))
        ends = seen.sum(1, dtype=torch.int32)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return flash_attention(query, key, value, None, ends, scale=scale, causal=is_causal)[0].transpose(1, 2)


def _not_served(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool
) -> str | None:
    """Why a call does not take the op; None where it does."""
    if dropout:
        return f"it has a dropout of {dropout}"
    if any(x.dtype != query.dtype or x.dtype not in DTYPES for x in (query, key, value)):
        return f"it computes in {query.dtype}"
    if mask is not None and mask.dtype != torch.bool:
        return "its mask is one to be added to the scores"
    if mask is not None and (mask.dim() != 4 or mask.shape[1:3] != (1, 1)):
        return f"its mask of shape {tuple(mask.shape)} is not one of keys, [B, 1, 1, S]"
    if causal and (mask is not None or query.shape[1] != key.shape[1]):
        return "it is causal with a mask, or with another number of keys than queries"
    return None
