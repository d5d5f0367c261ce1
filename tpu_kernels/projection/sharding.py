"""A model on the meta device, cut to what one chip of a plan has, by the model's own plans in transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ProjectionError
from .plan import ParallelPlan
from .records import Collective

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# The axis that each of transformers' styles splits a weight matrix along.
_AXES = {
    "colwise": -2,
    "colwise_gather_output": -2,
    "packed_colwise": -2,
    "rowwise": -1,
    "grouped_gemm": 0,
    "embedding_rowwise": 0,
}
_EXPERTS_STYLES = ("moe_tp_experts", "ep_dispatch_experts")
_SUMMED = ("rowwise", "embedding_rowwise", *_EXPERTS_STYLES)
_MATRICES = ("colwise", "rowwise")
_HEADS = ("q_proj", "k_proj", "v_proj")


def shard(model: PreTrainedModel, plan: ParallelPlan) -> tuple[Collective, ...]:
    """Cuts the parameters of `model` to a chip's part, and tells what chips then exchange.

    Raises:
        ProjectionError: The model cannot be split like this.
    """
    if plan.chips == 1:
        return ()
    collectives = []
    for rules, factors in _rules(model, plan):
        for pattern, style in rules.items():
            chips = factors(style)
            if chips == 1:
                continue
            for name, owner in _matches(model, pattern):
                if style in _AXES:
                    _cut(model, name, owner, style, chips, plan)
                if style == "ep_dispatch_experts":
                    _make_local(owner, plan)
                if style in _SUMMED and hasattr(owner, "forward"):
                    width = model.config.get_text_config().hidden_size
                    chips_ = plan.chips if style in _EXPERTS_STYLES else chips
                    collectives.append(_collective("all-reduce", name, chips_, width))
                elif style == "colwise_gather_output":
                    collectives.append(_collective("all-gather", name, chips, owner.out_features))
    if getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    # With both plans the experts are in each of them, and their sum is made once.
    return tuple({collective.module: collective for collective in collectives}.values())


def _collective(kind: Literal["all-reduce", "all-gather"], module: str, chips: int, width: int) -> Collective:
    return Collective(kind=kind, module=module, chips=chips, width=width)


def _rules(model: PreTrainedModel, plan: ParallelPlan) -> Iterator[tuple[Mapping[str, str], Any]]:
    rules = (model.ep_plan or {}) if plan.ep > 1 else {}
    if plan.tp > 1:
        # What the plan for experts splits too, over all chips, is left to it.
        others = {name: s for name, s in (model.tp_plan or {}).items() if rules.get(name) not in _MATRICES}
        yield others, lambda style: plan.tp
    if plan.ep > 1:
        if not rules:
            raise ProjectionError(
                f"{type(model).__name__} has no plan for expert parallelism in transformers; give --parallel "
                f"tp{plan.chips}"
            )
        yield rules, lambda style: plan.ep if style in ("grouped_gemm", *_EXPERTS_STYLES) else plan.chips


def _matches(model: PreTrainedModel, pattern: str) -> Iterator[tuple[str, Any]]:
    """The modules and parameters that a rule is for."""
    expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    for name, module in model.named_modules():
        if expression.fullmatch(name):
            yield name, module
    for name, parameter in model.named_parameters():
        if expression.fullmatch(name):
            yield name, parameter


def _cut(model: PreTrainedModel, name: str, owner: Any, style: str, chips: int, plan: ParallelPlan) -> None:
    import torch

    if isinstance(owner, torch.nn.Parameter):
        parent, _, attribute = name.rpartition(".")
        parameters = [(model.get_submodule(parent), attribute)]
    else:
        parameters = [(owner, attribute) for attribute, _ in owner.named_parameters(recurse=False)]
    for module, attribute in parameters:
        whole: torch.Tensor = getattr(module, attribute)
        axis = _AXES[style]
        if whole.dim() == 1 and style == "rowwise":
            continue  # the bias of a sum is added once
        axis = max(axis, -whole.dim()) if axis < 0 else axis
        size = whole.shape[axis]
        _check_split(model, name, style, size, chips, plan)
        shape = list(whole.shape)
        shape[axis] = -(-size // chips)
        setattr(module, attribute, torch.nn.Parameter(whole.new_empty(shape), requires_grad=False))


def _check_split(
    model: PreTrainedModel, name: str, style: str, size: int, chips: int, plan: ParallelPlan
) -> None:
    if style in ("colwise_gather_output", "embedding_rowwise"):
        return  # of the vocabulary, the last chip has less
    *_, parent, module = ["", *name.split(".")]
    unit, what = 1, f"{module} with its size of {size}"
    if module in _HEADS:
        unit = model.get_submodule(name.removesuffix(f".{module}")).head_dim
        what = f"the {size // unit} {'query' if module == 'q_proj' else 'key-value'} heads of {parent}"
    elif style == "grouped_gemm":
        what = f"{size} experts"
    if (size // unit) % chips:
        raise ProjectionError(
            f"{what} cannot be split over {chips} chips; {_way_out(model, size // unit, chips, plan)}"
        )


def _way_out(model: PreTrainedModel, units: int, chips: int, plan: ParallelPlan) -> str:
    most = max(n for n in range(1, chips + 1) if units % n == 0 and plan.chips % n == 0)
    if not model.ep_plan:
        return f"give --parallel tp{most}"
    mixed = f", or tp{most}ep{plan.chips // most}" if 1 < most < plan.chips else ""
    return f"keep attention whole on each chip and split the experts: --parallel ep{plan.chips}{mixed}"


def _make_local(experts: Any, plan: ParallelPlan) -> None:
    """Makes `experts` take experts of other chips for what they are: indices past its own."""
    local: int = experts.num_experts // plan.ep
    experts.num_experts = local
    experts._is_expert_parallel = True

    def to_local(module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, index, weights = arguments
        here = index < local
        return hidden, index.masked_fill(~here, local), weights * here

    experts.register_forward_pre_hook(to_local)
