"""The torch ops: `ragged_dot` and `experts`."""

from __future__ import annotations

import torch
from torch import Tensor

from . import functions, reference
from .activations import ACTIVATIONS, CLAMPED
from .cases import CASES
from .tpu_ops import Cost, InputError, op

DTYPES = (torch.bfloat16, torch.float32)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)


def _check_float(name: str, tensor: Tensor) -> None:
    _check(tensor.dtype in DTYPES, f"{name} has dtype {tensor.dtype}; supported: bfloat16 and float32")


def _check_index(name: str, tensor: Tensor) -> None:
    _check(
        tensor.dtype in (torch.int32, torch.int64),
        f"{name} has dtype {tensor.dtype}; it must be int32 or int64",
    )


def _check_rank(name: str, tensor: Tensor, rank: int, axes: str) -> None:
    _check(tensor.dim() == rank, f"{name} has shape {tuple(tensor.shape)}; it must have {rank} axes, {axes}")


def _check_sizes(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    group_offset: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    transpose_rhs: bool = False,
    preferred_element_type: torch.dtype | None = None,
    activation: str | None = None,
    gating: str | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
) -> None:
    if group_sizes.dim() != 1 or group_sizes.is_floating_point() or group_sizes.numel() == 0:
        return  # the declaration refuses it
    smallest = int(group_sizes.min())
    _check(smallest >= 0, f"group_sizes holds {smallest}; a group cannot have fewer than 0 rows")
    total = int(group_sizes.sum())
    _check(
        lhs.dim() != 2 or total <= lhs.shape[0],
        f"group_sizes sum to {total}, but lhs has {lhs.shape[0]} rows; the sum must not exceed them",
    )
    if group_offset is not None and group_offset.numel() == 1 and rhs.dim() == 3:
        first, last = int(group_offset), group_sizes.shape[0] - rhs.shape[0]
        _check(
            0 <= first <= last,
            f"group_offset is {first}; with {group_sizes.shape[0]} group sizes and weights for {rhs.shape[0]} "
            f"groups it must be within 0..{last}",
        )


def _ragged_dot_cost(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    group_offset: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    transpose_rhs: bool = False,
    preferred_element_type: torch.dtype | None = None,
    activation: str | None = None,
    gating: str | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
) -> Cost:
    m, k = lhs.shape
    groups, n = rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    result = (preferred_element_type or lhs.dtype).itemsize * (n // 2 if gating else n)
    active = min(groups, m)
    return Cost(flops=2 * m * k * n, bytes=lhs.dtype.itemsize * (m * k + active * k * n) + result * m)


@op(
    kernel=functions.ragged_dot,
    reference=reference.ragged_dot,
    differentiable=["lhs", "rhs", "bias"],
    check_values=_check_sizes,
    cost=_ragged_dot_cost,
    cases=CASES,
)
def ragged_dot(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    *,
    transpose_rhs: bool = False,
    group_offset: Tensor | None = None,
    bias: Tensor | None = None,
    preferred_element_type: torch.dtype | None = None,
    activation: str | None = None,
    gating: str | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
) -> Tensor:
    """Multiplies each group of consecutive rows of `lhs` with the weights of its group.

    Bias, activation and gate are applied in float32, before the result is rounded and written.

    Args:
      lhs: [M, K], bfloat16 or float32; the rows of group 0 first, then those of group 1, and so on.
      rhs: [G, K, N], or [G, N, K] with `transpose_rhs`, as transformers stores experts; the dtype of `lhs`.
      group_sizes: [S] int32 or int64, rows of each group, summing to M or less.
      transpose_rhs: `rhs` is stored as [G, N, K].
      group_offset: one int32 or int64. `rhs` holds the weights of groups offset to offset+G-1 of the S; the
        rows of all others come out as zeros. None: S == G.
      bias: [G, N], bfloat16 or float32, added to the rows of its group.
      preferred_element_type: dtype of the result, bfloat16 or float32; that of `lhs` when None. Sums are kept
        in float32.
      activation: "silu", "gelu", "gelu_tanh", "relu" or "relu2"; with a gate, of the gate, and then also
        "swiglu_clamped", gpt-oss's ``(up + 1) * gate * sigmoid(alpha * gate)``, of values within `limit`, if any.
      gating: "concatenated": the first N/2 columns are the gates of the others; "interleaved": each even column is
        that of the odd one after it. None: no gate.
      alpha, limit: of "swiglu_clamped".

    Returns: [M, N], or [M, N/2] with a gate; zeros in rows past the groups. Differentiable in `lhs`, `rhs` and
      `bias`.

    Raises:
      InputError: shapes, dtypes or devices do not fit; on the CPU also negative or too large group sizes. On a
        TPU, whose values are not looked at, a negative size counts as 0 and rows past M are cut off.

    Example:
      >>> lhs, rhs = torch.ones(4, 64), torch.ones(2, 64, 64)
      >>> ragged_dot(lhs, rhs, torch.tensor([1, 2]))[:, 0]
      tensor([64., 64., 64.,  0.])
    """
    _check_rank("lhs", lhs, 2, "[M, K]")
    _check_rank("rhs", rhs, 3, "[G, N, K]" if transpose_rhs else "[G, K, N]")
    _check_rank("group_sizes", group_sizes, 1, "[S]")
    _check_float("lhs", lhs)
    _check(rhs.dtype == lhs.dtype, f"lhs is {lhs.dtype} and rhs is {rhs.dtype}; both must be the same")
    _check_index("group_sizes", group_sizes)
    groups = rhs.shape[0]
    k, n = (rhs.shape[2], rhs.shape[1]) if transpose_rhs else (rhs.shape[1], rhs.shape[2])
    _check(
        k == lhs.shape[1],
        f"lhs has K = {lhs.shape[1]} but rhs, of shape {tuple(rhs.shape)} with transpose_rhs={transpose_rhs}, has "
        f"K = {k}",
    )
    _check(groups >= 1, f"rhs has shape {tuple(rhs.shape)}; it must hold the weights of at least 1 group")
    if group_offset is None:
        _check(
            group_sizes.shape[0] == groups,
            f"group_sizes has {group_sizes.shape[0]} entries but rhs has {groups} groups; give group_offset if rhs "
            "holds only a part of them",
        )
    else:
        _check_index("group_offset", group_offset)
        _check(group_offset.numel() == 1, f"group_offset has {group_offset.numel()} values; it must be one")
        _check(
            group_sizes.shape[0] >= groups,
            f"group_sizes has {group_sizes.shape[0]} entries, fewer than the {groups} groups of rhs",
        )
    out_dtype = preferred_element_type or lhs.dtype
    _check(
        out_dtype in DTYPES, f"preferred_element_type is {out_dtype}; supported: bfloat16, float32 and None"
    )
    if bias is not None:
        _check_float("bias", bias)
        _check(
            tuple(bias.shape) == (groups, n),
            f"bias has shape {tuple(bias.shape)}; for {groups} groups of {n} columns it must be {(groups, n)}",
        )
    _check(
        gating in (None, "concatenated", "interleaved"),
        f"gating is {gating!r}; supported: None, 'concatenated' and 'interleaved'",
    )
    known = [*ACTIVATIONS, CLAMPED] if gating else ACTIVATIONS
    _check(
        activation in known if gating else activation is None or activation in known,
        f"activation is {activation!r}; with gating={gating!r} supported: {', '.join(sorted(known))}",
    )
    _check(not gating or n % 2 == 0, f"rhs has N = {n} columns; with a gate they must be pairs")
    return lhs.new_empty((lhs.shape[0], n // 2 if gating else n), dtype=out_dtype)


def _experts_cost(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    activation: str = "silu",
    transposed: bool = False,
) -> Cost:
    pairs = top_k_index.numel()
    experts = gate_up_proj.shape[0]
    an_expert = gate_up_proj[0].numel() + down_proj[0].numel()
    weights = min(experts, pairs) * an_expert
    return Cost(
        flops=2 * pairs * an_expert,
        bytes=hidden_states.dtype.itemsize * (weights + 2 * hidden_states.numel()),
    )


@op(
    kernel=functions.experts,
    reference=reference.experts,
    differentiable=["hidden_states", "top_k_weights", "gate_up_proj", "down_proj"],
    cost=_experts_cost,
)
def experts(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    activation: str = "silu",
    transposed: bool = False,
) -> Tensor:
    """The experts of a mixture-of-experts layer: each token through its k experts, summed by weight.

    Args:
      hidden_states: [T, H], bfloat16 or float32.
      top_k_index: [T, k] int32 or int64, the experts of each token. An index of E or more is another rank's
        expert (expert parallelism): it contributes nothing.
      top_k_weights: [T, k], bfloat16 or float32.
      gate_up_proj: [E, 2I, H], or [E, H, 2I] when `transposed`; the gate's columns first, then those of up.
      down_proj: [E, H, I], or [E, I, H] when `transposed`.
      activation: "silu", "gelu", "gelu_tanh", "relu" or "relu2", applied to the gate.
      transposed: both weights are stored with the contraction before the columns.

    Returns: [T, H] in the dtype of `hidden_states`. Differentiable in everything but `top_k_index`.

    Raises:
      InputError: shapes, dtypes or devices do not fit, or there is no such activation.

    Example:
      >>> one = torch.ones
      >>> index = torch.tensor([[0, 1]])
      >>> experts(one(1, 64), index, one(1, 2) / 2, one(2, 128, 64) / 64, one(2, 64, 64) / 64)[0, 0]
      tensor(0.7311)
    """
    _check_rank("hidden_states", hidden_states, 2, "[T, H]")
    _check_rank("top_k_index", top_k_index, 2, "[T, k]")
    _check_rank("gate_up_proj", gate_up_proj, 3, "[E, H, 2I]" if transposed else "[E, 2I, H]")
    _check_rank("down_proj", down_proj, 3, "[E, I, H]" if transposed else "[E, H, I]")
    _check_float("hidden_states", hidden_states)
    _check_float("top_k_weights", top_k_weights)
    _check_index("top_k_index", top_k_index)
    tokens, hidden = hidden_states.shape
    for name, weight in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        _check(
            weight.dtype == hidden_states.dtype,
            f"hidden_states is {hidden_states.dtype} and {name} is {weight.dtype}; both must be the same",
        )
    _check(
        top_k_index.shape[0] == tokens and top_k_weights.shape == top_k_index.shape,
        f"top_k_index has shape {tuple(top_k_index.shape)} and top_k_weights {tuple(top_k_weights.shape)}; both "
        f"must be [T, k] with T = {tokens}",
    )
    count = gate_up_proj.shape[0]
    _check(count >= 1, f"gate_up_proj has shape {tuple(gate_up_proj.shape)}; it must hold at least 1 expert")
    columns = gate_up_proj.shape[2 if transposed else 1]
    inner = columns // 2
    expected_gate_up = (count, hidden, 2 * inner) if transposed else (count, 2 * inner, hidden)
    expected_down = (count, inner, hidden) if transposed else (count, hidden, inner)
    _check(
        tuple(gate_up_proj.shape) == expected_gate_up and tuple(down_proj.shape) == expected_down,
        f"gate_up_proj has shape {tuple(gate_up_proj.shape)} and down_proj {tuple(down_proj.shape)}; with H = "
        f"{hidden} and transposed={transposed} they must be {expected_gate_up} and {expected_down}",
    )
    _check(
        activation in ACTIVATIONS,
        f"activation is {activation!r}; supported: {', '.join(sorted(ACTIVATIONS))}",
    )
    return torch.empty_like(hidden_states)
