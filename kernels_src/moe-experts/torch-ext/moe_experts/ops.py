"""The torch op `fused_experts`."""

from __future__ import annotations

import torch
from torch import Tensor

from . import functions, reference
from .activations import ACTIVATIONS
from .cases import CASES
from .ragged_dot.ops import check_quantised
from .ragged_dot.quantised import PER_WORD
from .tpu_ops import Cost, InputError, op

DTYPES = (torch.bfloat16, torch.float32)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], axes: str) -> None:
    _check(
        tuple(tensor.shape) == expected,
        f"{name} has shape {tuple(tensor.shape)}; with the other operands' axes it must be {axes} = {expected}",
    )


def _check_shared(
    into: Tensor | None,
    back: Tensor | None,
    weights: Tensor | None,
    hidden_states: Tensor,
    transposed: bool,
    gated: bool,
) -> None:
    if into is None or back is None:
        _check(
            into is back is weights,
            "shared_gate_up and shared_down go together, and shared_weights with them; give both or none",
        )
        return
    tokens, hidden = hidden_states.shape
    _check(
        back.dim() == 2,
        f"shared_down has shape {tuple(back.shape)}; it must be {'[I, H]' if transposed else '[H, I]'}",
    )
    inner = back.shape[0 if transposed else 1]
    rows = 2 * inner if gated else inner
    shapes = {"shared_gate_up": (rows, hidden), "shared_down": (hidden, inner)}
    for name, tensor in (("shared_gate_up", into), ("shared_down", back)):
        _check(
            tensor.dtype == hidden_states.dtype,
            f"{name} is {tensor.dtype}; it must be {hidden_states.dtype}, as hidden_states is",
        )
        axes = "[U, H]" if name == "shared_gate_up" else "[H, I]"
        if transposed:
            _check_shape(name, tensor, shapes[name][::-1], f"[{axes[4]}, {axes[1]}]")
        else:
            _check_shape(name, tensor, shapes[name], axes)
    if weights is not None:
        _check_shape("shared_weights", weights, (tokens,), "[T]")
        _check(
            weights.dtype in DTYPES,
            f"shared_weights has dtype {weights.dtype}; supported: bfloat16 and float32",
        )


def _cost(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_weights: Tensor | None = None,
    **form: object,
) -> Cost:
    pairs, experts = top_k_index.numel(), down_proj.shape[0]
    an_expert = gate_up_proj[0].numel() + down_proj[0].numel()
    weights = min(experts, pairs) * an_expert * gate_up_proj.dtype.itemsize
    an_expert *= PER_WORD if gate_up_proj.dtype == torch.int32 else 1
    states = 2 * hidden_states.numel() * hidden_states.dtype.itemsize
    shared = sum(w.numel() for w in (shared_gate_up, shared_down) if w is not None)
    return Cost(
        flops=2 * (pairs * an_expert + len(hidden_states) * shared),
        bytes=weights + states + shared * hidden_states.dtype.itemsize,
    )


@op(
    kernel=functions.fused_experts,
    reference=reference.fused_experts,
    differentiable=[
        "hidden_states",
        "top_k_weights",
        "gate_up_proj",
        "down_proj",
        "gate_up_bias",
        "down_bias",
        "gate_up_scale",
        "down_scale",
        "shared_gate_up",
        "shared_down",
        "shared_weights",
    ],
    cost=_cost,
    cases=CASES,
)
def fused_experts(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_weights: Tensor | None = None,
    *,
    transposed: bool = False,
    activation: str = "silu",
    gated: bool = True,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Tensor:
    """The experts of a mixture-of-experts layer: each token through its k experts, summed by weight.

    One kernel call for the tokens of a decode step, which reads only the weights of experts that have tokens; for
    more than some hundred tokens, and for the gradient, grouped matmuls over tokens sorted by expert.

    An expert computes ``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` unless `gated`. Quantised weights are
    made floats in vector memory, as they are used; only for the gradient XLA makes floats of all of them first.

    Args:
      hidden_states: [T, H], bfloat16 or float32.
      top_k_index: [T, k] int32 or int64, the experts of each token. An index of E or more is another rank's expert
        (expert parallelism): it contributes nothing.
      top_k_weights: [T, k], bfloat16 or float32.
      gate_up_proj: [E, U, H], or [E, H, U] when `transposed`, with U = 2I, or U = I unless `gated`; the dtype of
        `hidden_states`, or int8; or MXFP4, the words of ragged-dot's ``pack_mxfp4``, which count as `transposed`.
      down_proj: [E, H, I], or [E, I, H] when `transposed`.
      gate_up_bias, down_bias: [E, U] and [E, H], both or none, in the dtype of `hidden_states`.
      gate_up_scale, down_scale: [E, U] and [E, H] float32, for int8 weights: each column of a product is multiplied
        by its number. For MXFP4 the exponents of ``pack_mxfp4``.
      shared_gate_up, shared_down: a shared expert, which all tokens have: [U', H] and [H, I'], or [H, U'] and [I', H]
        when `transposed`, in the dtype of `hidden_states`. It is streamed in the same call, first, if U' is U and the
        experts have no biases and are not quantised; else XLA computes it beside the call.
      shared_weights: [T], bfloat16 or float32: what a token's result of it is multiplied by, such as the sigmoid of
        its gate. None: one.
      transposed: both weights are stored with the contraction before the columns.
      activation: "silu", "gelu", "gelu_tanh", "relu" or "relu2".
      gated: the first product has gate and up columns.
      interleaved: these alternate; else those of the gate come first.
      alpha: for "silu", the factor in ``x * sigmoid(alpha * x)``.
      limit: clamps the gate to at most this, and up to within plus and minus this.
      up_offset: is added to up.

    Returns: [T, H] in the dtype of `hidden_states`; sums are kept in float32. A token with an inf or NaN touches no
      other token's row. Differentiable in everything but `top_k_index` and weights of integers.

    Raises:
      InputError: shapes, dtypes or devices do not fit, or there is no such activation.

    Example:
      >>> one = torch.ones
      >>> index = torch.tensor([[0, 1]])
      >>> fused_experts(one(1, 64), index, one(1, 2) / 2, one(2, 128, 64) / 64, one(2, 64, 64) / 64)[0, 0]
      tensor(0.7311)
    """
    for name, tensor, rank, axes in (
        ("hidden_states", hidden_states, 2, "[T, H]"),
        ("top_k_index", top_k_index, 2, "[T, k]"),
        ("gate_up_proj", gate_up_proj, 3, "[E, H, U]" if transposed else "[E, U, H]"),
        ("down_proj", down_proj, 3, "[E, I, H]" if transposed else "[E, H, I]"),
    ):
        _check(
            tensor.dim() == rank, f"{name} has shape {tuple(tensor.shape)}; it must have {rank} axes, {axes}"
        )
    for name, tensor in (("hidden_states", hidden_states), ("top_k_weights", top_k_weights)):
        _check(tensor.dtype in DTYPES, f"{name} has dtype {tensor.dtype}; supported: bfloat16 and float32")
    _check(
        top_k_index.dtype in (torch.int32, torch.int64),
        f"top_k_index has dtype {top_k_index.dtype}; it must be int32 or int64",
    )
    _check(
        activation in ACTIVATIONS,
        f"activation is {activation!r}; supported: {', '.join(sorted(ACTIVATIONS))}",
    )
    _check(
        (gate_up_bias is None) == (down_bias is None),
        "gate_up_bias and down_bias go together; give both or none",
    )
    scaled = gate_up_scale is not None and down_scale is not None
    _check(
        scaled == (gate_up_scale is not None or down_scale is not None),
        "gate_up_scale and down_scale go together; give both or none",
    )
    _check(
        gate_up_proj.dtype == down_proj.dtype,
        f"down_proj is {down_proj.dtype}; it must be {gate_up_proj.dtype}, as gate_up_proj is",
    )
    for name, operand in (
        ("gate_up_proj", None if scaled else gate_up_proj),
        ("gate_up_bias", gate_up_bias),
        ("down_bias", down_bias),
    ):
        _check(
            operand is None or operand.dtype == hidden_states.dtype,
            f"{name} is {getattr(operand, 'dtype', None)}; it must be {hidden_states.dtype}, as hidden_states is; "
            "weights may also be quantised, with scales",
        )

    tokens, hidden = hidden_states.shape
    experts, inner = down_proj.shape[0], down_proj.shape[1 if transposed else 2]
    rows = 2 * inner if gated else inner
    _check_shape("top_k_index", top_k_index, (tokens, top_k_index.shape[1]), "[T, k]")
    _check_shape("top_k_weights", top_k_weights, (tokens, top_k_index.shape[1]), "[T, k]")
    if gate_up_scale is not None and down_scale is not None:
        if gate_up_proj.dtype == torch.int32:
            # The words' K is rounded up.
            rows = gate_up_proj.shape[2]
            inner = rows // 2 if gated else rows
        into, back = ("gate_up_scale", gate_up_scale), ("down_scale", down_scale)
        check_quantised(("gate_up_proj", gate_up_proj), into, hidden, rows, transposed=not transposed)
        check_quantised(("down_proj", down_proj), back, inner, hidden, transposed=not transposed)
        _check(
            gate_up_proj.dtype == torch.int32 or gate_up_scale.dim() == down_scale.dim() == 2,
            "gate_up_scale and down_scale have one number for each column, [E, U] and [E, H]",
        )
        _check(
            gate_up_proj.shape[0] == experts,
            f"gate_up_proj has {gate_up_proj.shape[0]} experts and down_proj {experts}; both must have the same",
        )
    elif transposed:
        _check_shape("down_proj", down_proj, (experts, inner, hidden), "[E, I, H]")
        _check_shape("gate_up_proj", gate_up_proj, (experts, hidden, rows), "[E, H, U]")
    else:
        _check_shape("down_proj", down_proj, (experts, hidden, inner), "[E, H, I]")
        _check_shape("gate_up_proj", gate_up_proj, (experts, rows, hidden), "[E, U, H]")
    _check_shared(shared_gate_up, shared_down, shared_weights, hidden_states, transposed, gated)
    if gate_up_bias is not None and down_bias is not None:
        _check_shape("gate_up_bias", gate_up_bias, (experts, rows), "[E, U]")
        _check_shape("down_bias", down_bias, (experts, hidden), "[E, H]")
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
