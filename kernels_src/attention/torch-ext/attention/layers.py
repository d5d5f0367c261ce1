"""`attention_forward`: the ops as the attention function of a transformers model, with its mask function.

A decode step over a static cache takes `decode_attention`, prefill and training take `flash_attention`. transformers
says by a boolean mask [B, 1, L, S] what each token sees, or by none that it is all of it, up to itself where the module
is causal. The keys that a token sees are one run in the mask (causality, padding, windows, chunks and packed sequences
make it so); its ends are what the ops need. What they do not serve takes torch's scaled_dot_product_attention, or with
sinks or a soft cap, which that has not, the same in plain torch.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from .ops import DTYPES, MOST_NEW, decode_attention, flash_attention

_logger = logging.getLogger("tpu_kernels.attention")


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function for transformers. Register it together with `attention_mask`.

    A token whose mask has a gap, such as keys that were padded on the right before it was generated, gets NaN: wrong
    tokens would go unnoticed. One that sees no key gets zeros.

    Args:
      module: the attention module.
      query: [B, Hq, L, D]. key: [B, H, S, D]. value: [B, H, S, E].
      attention_mask: bool, True where a token sees a key; or added to the scores; or None.
      scaling, dropout, is_causal, sliding_window, softcap, s_aux: as transformers gives them; `s_aux` are sinks.

    Returns: [B, L, Hq, E], and None for the weights.

    Example:
      >>> from transformers import AttentionInterface, AttentionMaskInterface  # doctest: +SKIP
      >>> AttentionInterface.register("tpu_attention", attention_forward)  # doctest: +SKIP
      >>> AttentionMaskInterface.register("tpu_attention", attention_mask)  # doctest: +SKIP
    """
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    reason = _not_served(module, query, key, value, attention_mask, dropout, others)
    if reason is None:
        form = {"scale": scaling, "softcap": softcap}
        out = _by_kernel(query, key, value, attention_mask, s_aux, causal, sliding_window, form)
        return out.transpose(1, 2), None
    if not torch.compiler.is_compiling():
        log_once(type(module).__name__, reason)
    if softcap is None and s_aux is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **others
        )
    dropout = dropout if module.training else 0.0
    out = _plain_attention(query, key, value, attention_mask, scaling, causal, softcap, s_aux, dropout)
    return out.transpose(1, 2), None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    *args: Any,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function that belongs to `attention_forward`: transformers' for sdpa.

    Where the cache grows with every token the mask is one to be added: a kernel compiled anew for each length would
    cost more than it saves, and `attention_forward` leaves such masks to sdpa.
    """
    from transformers.masking_utils import sdpa_mask

    dtype = kwargs.get("dtype", torch.float32)
    mask = sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, *args, **kwargs)
    grows = not isinstance(q_offset, Tensor) and kv_length == q_offset + q_length
    if mask is None or not grows or q_length > MOST_NEW:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


def _not_served(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    others: dict[str, Any],
) -> str | None:
    """Why a call does not take an op; None where it does. Looks at shapes and dtypes alone."""
    if mask is None and query.shape[2] == 1:
        return "a step of one token without a mask: the cache is not static"
    if mask is not None and mask.dtype != torch.bool:
        return "its mask is one to be added to the scores, as where a cache grows with every token"
    if mask is not None and (
        mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2:] != (query.shape[2], key.shape[2])
    ):
        return f"its mask of shape {tuple(mask.shape)} is not [B, 1, L, S]"
    if any(tensor.dtype != query.dtype or tensor.dtype not in DTYPES for tensor in (query, key, value)):
        return f"it computes in {query.dtype}"
    if module.training and dropout:
        return f"it has a dropout of {dropout}"
    if others.get("position_bias") is not None:
        return "it has a position bias"
    return None


def _by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    window: int | None,
    form: dict[str, Any],
) -> Tensor:
    new, keys = query.shape[2], key.shape[2]
    if mask is None:
        ends = None
        if causal and new != keys:
            # The first tokens of an empty cache that has room for more.
            ends = torch.arange(1, new + 1, device=query.device).expand(query.shape[0], -1)
        return flash_attention(query, key, value, None, ends, sinks, causal=causal and new == keys, **form)[0]
    starts, ends, whole = _runs(mask[:, 0].expand(query.shape[0], -1, -1))
    query = query.masked_fill(~whole[:, None, :, None], float("nan"))
    if new <= MOST_NEW:
        return decode_attention(query, key, value, ends, starts, sinks, window=window, **form)
    return flash_attention(query, key, value, starts, ends, sinks, **form)[0]


@functools.cache
def log_once(module: str, reason: str) -> None:
    _logger.info("%s takes sdpa: %s", module, reason)


def _runs(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each row of a mask [B, L, S]: its first True, the end of its last one, and whether all between are True."""
    keys = mask.shape[-1]
    place = torch.arange(keys, device=mask.device, dtype=torch.int32)
    starts = torch.where(mask, place, keys).amin(-1)
    ends = torch.where(mask, place + 1, 0).amax(-1)
    seen = mask.sum(-1, dtype=torch.int32)
    return starts, ends, (seen == ends - starts) | (seen == 0)


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    causal: bool,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    """Attention with sinks and a soft cap in plain torch: [B, Hq, L, E]. Softmax in float32."""
    heads, new, dim = query.shape[1:]
    keys = key.shape[2]
    grouped = query.unflatten(1, (key.shape[1], -1))  # [B, H, G, L, D]
    scores = (grouped @ key[:, :, None].transpose(-1, -2)).flatten(1, 2).float()
    scores = scores * (dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None and causal and new > 1:
        mask = torch.ones(new, keys, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        # As in transformers' eager attention a row that sees nothing stays finite.
        lowest = torch.finfo(torch.float32).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        column = sinks.float().view(1, heads, 1, 1).expand(query.shape[0], -1, new, -1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., :keys].to(value.dtype)
    weights = torch.nn.functional.dropout(weights, dropout)
    return (weights.unflatten(1, (key.shape[1], -1)) @ value[:, :, None]).flatten(1, 2)


attention_forward.mask = attention_mask  # type: ignore[attr-defined]
# What transformers looks for in an attention repository on the Hub, `attn_implementation="tpu-kernels/attention"`.
flash_attn_forward = attention_forward
supports_flash_attn = True
