"""The torch op: what it takes, what it gives, what it costs."""

from __future__ import annotations

import torch
from torch import Tensor

from . import cases, kernel, reference
from .tpu_ops import Cost, InputError, op

DTYPES = (torch.bfloat16, torch.float32)


def _check_tensors(logits: Tensor, bias: Tensor | None) -> None:
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= kernel.MOST_EXPERTS:
        raise InputError(
            f"logits has shape {tuple(logits.shape)}; it must be [T, E] with E from 1 to {kernel.MOST_EXPERTS}"
        )
    if bias is not None and tuple(bias.shape) != (logits.shape[1],):
        raise InputError(
            f"correction_bias has shape {tuple(bias.shape)}; for these logits it must be [{logits.shape[1]}]"
        )
    for name, tensor in (("logits", logits), ("correction_bias", bias)):
        if tensor is not None and tensor.dtype not in DTYPES:
            raise InputError(f"{name} has dtype {tensor.dtype}; supported: bfloat16 and float32")


def _check_groups(experts: int, n_group: int, topk_group: int, group_top: int) -> None:
    if not 1 <= n_group <= kernel.MOST_GROUPS or experts % n_group:
        raise InputError(
            f"n_group is {n_group}; it must divide the {experts} experts and be from 1 to {kernel.MOST_GROUPS}"
        )
    if not 1 <= topk_group <= n_group:
        raise InputError(f"topk_group is {topk_group}; it must be from 1 to n_group, {n_group}")
    if topk_group < n_group and not 1 <= group_top <= experts // n_group:
        raise InputError(
            f"group_top is {group_top}; it must be from 1 to the {experts // n_group} experts of a group"
        )


def _cost(logits: Tensor, correction_bias: Tensor | None = None, *, top_k: int, **settings: object) -> Cost:
    return Cost(
        flops=(4 + 4 * top_k) * logits.numel(),
        bytes=logits.numel() * logits.dtype.itemsize + 8 * logits.shape[0] * top_k,
    )


@op(
    kernel=kernel.route,
    reference=reference.route,
    differentiable=["logits"],
    cost=_cost,
    cases=cases.benchmarks(),
)
def route(
    logits: Tensor,
    correction_bias: Tensor | None = None,
    *,
    top_k: int,
    scoring_func: str = "softmax",
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    n_group: int = 1,
    topk_group: int = 1,
    group_top: int = 2,
) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each token. Arguments have the names of the models' configurations.

    Args:
      logits: [T, E], bfloat16 or float32, E of up to 512.
      correction_bias: [E], bfloat16 or float32. Is added to the scores for the choice, not for the weights.
      top_k: experts per token, up to 16.
      scoring_func: "softmax" over all experts, or "sigmoid".
      norm_topk_prob: the weights of a token add up to one, before they are scaled.
      routed_scaling_factor: what the weights are multiplied by.
      n_group, topk_group: only experts of the best `topk_group` of `n_group` equal groups are chosen.
      group_top: how many of its best experts make up a group's score: 2 in DeepSeek V3, 1 in V2.

    Returns: weights, float32, and indices, int32, both [T, top_k], best first. Scores are computed in float32; of equal
      ones the expert with the lowest index comes first. The weights are differentiable in the logits.

    Raises:
      InputError: shapes, dtypes, devices or settings do not fit.

    Example:
      >>> route(torch.tensor([[0.0, 2.0, 2.0, 1.0]]), top_k=2)
      (tensor([[0.5000, 0.5000]]), tensor([[1, 2]], dtype=torch.int32))
    """
    _check_tensors(logits, correction_bias)
    experts = logits.shape[1]
    _check_groups(experts, n_group, topk_group, group_top)
    allowed = experts // n_group * topk_group
    if not 1 <= top_k <= min(allowed, kernel.MOST_CHOSEN):
        raise InputError(
            f"top_k is {top_k}; it must be from 1 to {min(allowed, kernel.MOST_CHOSEN)}, of {allowed} experts that "
            f"may be chosen"
        )
    if scoring_func not in ("softmax", "sigmoid"):
        raise InputError(f"scoring_func is {scoring_func!r}; it must be 'softmax' or 'sigmoid'")
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)
