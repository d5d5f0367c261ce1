"""`experts_forward`: this op as the experts function of a transformers model.

A module that transformers' ``use_experts_implementation`` has decorated says by flags how its experts work. Those
that the op can compute take the *fused* path: one call for the tokens of a decode step, grouped matmuls for more and
for gradients, all inside the op. The others, with a norm after the experts or a gate function that is not known here,
run what ragged-dot has for them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .activations import Gate
from .ops import DTYPES, fused_experts
from .ragged_dot import layers as ragged
from .ragged_dot.ops import pack_mxfp4
from .ragged_dot.quantised import BLOCK
from .tpu_ops import InputError


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
    scales = (getattr(self, f"{name}_scale"), self.down_proj_scale) if _is_mxfp4(self) else (None, None)
    dtype = into.dtype if into.is_floating_point() else hidden_states.dtype
    out = fused_experts(
        hidden_states.to(dtype),
        top_k_index,
        top_k_weights,
        into,
        self.down_proj,
        *(bias if bias is None else bias.to(dtype) for bias in biases),
        *scales,
        transposed=self.is_transposed,
        activation=form.activation,
        gated=form.gated,
        interleaved=form.interleaved,
        alpha=form.alpha,
        limit=form.limit,
        up_offset=form.up_offset,
    )
    return out.to(hidden_states.dtype)


def use_mxfp4(module: Any, gate_up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]) -> None:
    """Gives an experts module MXFP4 weights in place of its own: `experts_forward` then reads a quarter of the bytes.

    They are packed once, here, and are in the module's ``state_dict``: int32 ``gate_up_proj`` and ``down_proj``, uint8
    ``gate_up_proj_scale`` and ``down_proj_scale``. They have no gradient. Only `experts_forward` can compute the module
    then, not the model's own code.

    Args:
      module: as for `experts_forward`, with a gate, and weights stored with the contraction first, as gpt-oss's are.
      gate_up, down: blocks [E, N, K/32, 16] and scales [E, N, K/32], uint8, as its checkpoints store them under
        ``gate_up_proj_blocks`` and so on; on the device of the module's weights.

    Raises:
      InputError: the op cannot compute the module, or shapes and dtypes do not fit.

    Example:
      >>> experts = model.model.layers[0].mlp.experts  # doctest: +SKIP
      >>> use_mxfp4(experts, (gate_up_blocks, gate_up_scales), (down_blocks, down_scales))  # doctest: +SKIP
    """
    form = _form(module)
    if isinstance(form, str) or not module.is_transposed or not module.has_gate:
        reason = form if isinstance(form, str) else "its weights are not stored with the contraction first"
        raise InputError(f"{type(module).__name__} cannot have MXFP4 weights: {reason}")
    for name, (blocks, scales) in (("gate_up_proj", gate_up), ("down_proj", down)):
        experts, k, n = getattr(module, name).shape
        if tuple(scales.shape) != (experts, n, k // BLOCK) or k % BLOCK:
            raise InputError(
                f"{name} has scales of shape {tuple(scales.shape)}; for weights {(experts, k, n)} they must be "
                f"[E, N, K/{BLOCK}] = {(experts, n, k // BLOCK)}"
            )
        words, exponents = pack_mxfp4(blocks, scales)
        for attribute, tensor in ((name, words), (f"{name}_scale", exponents)):
            setattr(module, attribute, torch.nn.Parameter(tensor, requires_grad=False))


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
        held = isinstance(weight, Tensor) and (weight.dtype in DTYPES or _is_mxfp4(module))
        if not held or weight.dim() != 3:
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


def _is_mxfp4(module: Any) -> bool:
    """Whether `module` has the weights that `use_mxfp4` gives one."""
    return (
        isinstance(getattr(module, "down_proj_scale", None), Tensor) and module.down_proj.dtype == torch.int32
    )


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
