"""`experts_forward`: this op as the experts function of a transformers model.

A module that transformers' ``use_experts_implementation`` has decorated says by flags how its experts work. Those
that the op can compute take the *fused* path: one call for the tokens of a decode step, grouped matmuls for more and
for gradients, all inside the op. The others, with a norm after the experts or a gate function that is not known here,
run what ragged-dot has for them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from .activations import Gate
from .ops import DTYPES, fused_experts
from .ragged_dot import layers as ragged


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """An experts function for transformers: the experts of `self`, with this kernel's op.

    Args:
      self: a module whose class ``use_experts_implementation`` has decorated.
      hidden_states: [T, H]. top_k_index: [T, k] int64. top_k_weights: [T, k], bfloat16 or float32.

    Returns: [T, H] in the dtype of `hidden_states`.

    Example:
      >>> from transformers.integrations.moe import ExpertsInterface  # doctest: +SKIP
      >>> ExpertsInterface.register("tpu_fused_experts", experts_forward)  # doctest: +SKIP
    """
    form = _form(self)
    if isinstance(form, str):
        return ragged.experts_forward(self, hidden_states, top_k_index, top_k_weights)
    name = "gate_up_proj" if form.gated else "up_proj"
    into = getattr(self, name)
    biases = (getattr(self, f"{name}_bias"), self.down_proj_bias) if self.has_bias else (None, None)
    out = fused_experts(
        hidden_states.to(into.dtype),
        top_k_index,
        top_k_weights,
        into,
        self.down_proj,
        *biases,
        transposed=self.is_transposed,
        activation=form.activation,
        gated=form.gated,
        interleaved=form.interleaved,
        alpha=form.alpha,
        limit=form.limit,
        up_offset=form.up_offset,
    )
    return out.to(hidden_states.dtype)


def explain(module: Any) -> ragged.Path:
    """Which path the experts of `module` take, and why: "fused", or one of ragged-dot's.

    Example:
      >>> explain(model.model.layers[0].mlp.experts)  # doctest: +SKIP
      Path(name='fused', reason='', activation='silu')
    """
    form = _form(module)
    if not isinstance(form, str):
        return ragged.Path("fused", activation=form.activation)
    path = ragged.explain(module)
    return path if path.reason else dataclasses.replace(path, reason=form)


def _form(module: Any) -> Gate | str:
    """What the experts of `module` compute, or why this op cannot."""
    into = getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None)
    for name, weight in (("first", into), ("down_proj", getattr(module, "down_proj", None))):
        if not isinstance(weight, Tensor) or weight.dim() != 3 or weight.dtype not in DTYPES:
            return f"its {name} weight is no bfloat16 or float32 tensor with 3 axes"
    if module.has_post_expert_norm:
        return "its experts end in a norm"
    if not module.has_gate:
        activation = _activation(module)
        return Gate(activation, gated=False) if activation else _unknown_activation(module)
    known = _GATES.get(type(module)._apply_gate.__module__)
    if known is None:
        return "it has a gate function of its own"
    return known(module) or _unknown_activation(module)


def _unknown_activation(module: Any) -> str:
    return f"its activation is {type(module.act_fn).__name__}"


_ACTIVATIONS = ragged.ACTIVATION_NAMES | {("transformers.activations", "ReLUSquaredActivation"): "relu2"}


def _activation(module: Any) -> str | None:
    """Our name of a module's activation, or None where it is not one of ours."""
    return _ACTIVATIONS.get((type(module.act_fn).__module__, type(module.act_fn).__name__))


def _plain(module: Any) -> Gate | None:
    activation = _activation(module)
    return Gate(activation) if activation else None


def _clamped(module: Any) -> Gate | None:
    activation = _activation(module)
    return Gate(activation, limit=module.limit) if activation else None


def _gpt_oss(module: Any) -> Gate:
    return dataclasses.replace(_swiglu(module), interleaved=True)


def _swiglu(module: Any) -> Gate:
    return Gate(alpha=module.alpha, limit=module.limit, up_offset=1.0)


def _minimax(module: Any) -> Gate:
    return Gate(alpha=module.swiglu_alpha, limit=module.swiglu_limit, up_offset=1.0)


# By the module that defines the gate function: those whose code is known.
_GATES = {
    "transformers.integrations.moe": _plain,
    "transformers.models.deepseek_v4.modeling_deepseek_v4": _clamped,
    "transformers.models.gpt_oss.modeling_gpt_oss": _gpt_oss,
    "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl": _minimax,
    "transformers.models.openai_privacy_filter.modeling_openai_privacy_filter": _swiglu,
}

experts_forward.explain = explain  # type: ignore[attr-defined]
