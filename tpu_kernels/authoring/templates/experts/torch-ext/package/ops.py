"""The torch op: what it takes, what it gives, what it costs."""

from __future__ import annotations

import torch
from torch import Tensor

from . import cases, kernel, reference
from .tpu_ops import Cost, InputError, op

DTYPES = (torch.bfloat16, torch.float32)


def _cost(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
) -> Cost:
    chosen = min(top_k_index.numel(), down_proj.shape[0]) * 3 * down_proj[0].numel()
    flops = 6 * top_k_index.numel() * down_proj[0].numel()
    return Cost(flops=flops, bytes=(chosen + 2 * hidden_states.numel()) * hidden_states.dtype.itemsize)


@op(
    kernel=kernel.experts,
    reference=reference.experts,
    differentiable=["hidden_states", "top_k_weights", "gate_up_proj", "down_proj"],
    cost=_cost,
    cases=cases.benchmarks(),
)
def experts(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
) -> Tensor:
    """The experts of a mixture-of-experts layer: each token through its k experts, summed by weight.

    Args:
      hidden_states: [T, H], bfloat16 or float32, with T <= 64 and H <= 4096.
      top_k_index: [T, k] int32 or int64; an index of E or more is another rank's expert and counts for none.
      top_k_weights: [T, k], bfloat16 or float32.
      gate_up_proj: [E, 2I, H], the gates' rows first; the dtype of `hidden_states`.
      down_proj: [E, H, I].

    Returns: [T, H] in the dtype of `hidden_states`; sums are in float32. Differentiable in all but `top_k_index`.

    Raises:
      InputError: shapes, dtypes or devices do not fit.

    Example:
      >>> one = torch.ones
      >>> experts(one(1, 64), torch.tensor([[0]]), one(1, 1), one(2, 256, 64) / 64, one(2, 64, 128) / 128)[0, 0]
      tensor(0.7311)
    """
    if hidden_states.dim() != 2 or top_k_index.dim() != 2 or down_proj.dim() != 3:
        raise InputError(
            f"hidden_states has shape {tuple(hidden_states.shape)}, top_k_index {tuple(top_k_index.shape)} and "
            f"down_proj {tuple(down_proj.shape)}; they must be [T, H], [T, k] and [E, H, I]"
        )
    tokens, hidden = hidden_states.shape
    count, _, inner = down_proj.shape
    if tokens > kernel.MOST_TOKENS or hidden > kernel.MOST_HIDDEN:
        raise InputError(
            f"hidden_states has shape {tuple(hidden_states.shape)}; at most {kernel.MOST_TOKENS} tokens of "
            f"{kernel.MOST_HIDDEN} are supported"
        )
    expected = {"gate_up_proj": (count, 2 * inner, hidden), "down_proj": (count, hidden, inner)}
    for name, weight in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        if tuple(weight.shape) != expected[name]:
            raise InputError(f"{name} has shape {tuple(weight.shape)}; it must be {expected[name]}")
        if weight.dtype not in DTYPES or weight.dtype != hidden_states.dtype:
            raise InputError(
                f"{name} is {weight.dtype} and hidden_states {hidden_states.dtype}; both must be bfloat16, or float32"
            )
    if top_k_index.shape[0] != tokens or top_k_index.shape != top_k_weights.shape:
        raise InputError(
            f"top_k_index has shape {tuple(top_k_index.shape)} and top_k_weights {tuple(top_k_weights.shape)}; both "
            f"must be [{tokens}, k]"
        )
    if top_k_index.dtype not in (torch.int32, torch.int64) or top_k_weights.dtype not in DTYPES:
        raise InputError(
            f"top_k_index is {top_k_index.dtype} and top_k_weights {top_k_weights.dtype}; they must be int32 or int64, "
            "and bfloat16 or float32"
        )
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
