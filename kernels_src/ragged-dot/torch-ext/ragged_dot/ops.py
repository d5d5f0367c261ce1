"""The torch ops: `ragged_dot`, `pack_mxfp4` for its weights, and `experts`."""

from __future__ import annotations

import torch
from torch import Tensor

from . import functions, quantised, reference
from .activations import ACTIVATIONS, CLAMPED
from .cases import CASES
from .quantised import BLOCK, LEAST_EXPONENT, MOST_EXPONENT, PER_WORD, exponents_of, packed_depth
from .tiles import LANES
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
    rhs_scale: Tensor | None = None,
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
    rhs_scale: Tensor | None = None,
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
    held = sum(w.numel() * w.dtype.itemsize for w in (rhs, rhs_scale) if w is not None)
    active = held * min(groups, m) // groups
    return Cost(flops=2 * m * k * n, bytes=lhs.dtype.itemsize * m * k + active + result * m)


@op(
    kernel=functions.ragged_dot,
    reference=reference.ragged_dot,
    differentiable=["lhs", "rhs", "bias", "rhs_scale"],
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
    rhs_scale: Tensor | None = None,
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
      rhs: [G, K, N], or [G, N, K] with `transpose_rhs`, as transformers stores experts; the dtype of `lhs`. Or
        quantised, with `rhs_scale`: int8 in these shapes, or the words of `pack_mxfp4`, not transposed.
      group_sizes: [S] int32 or int64, rows of each group, summing to M or less.
      transpose_rhs: `rhs` is stored as [G, N, K].
      group_offset: one int32 or int64. `rhs` holds the weights of groups offset to offset+G-1 of the S; the
        rows of all others come out as zeros. None: S == G.
      bias: [G, N], bfloat16 or float32, added to the rows of its group.
      rhs_scale: what quantised weights are multiplied by. For int8, float32 [G, N], one for each column, or [G, B, N],
        one for each column of each of B equal parts of K, whose length is a multiple of 128 if there are several. For
        MXFP4 the exponents of `pack_mxfp4`. Weights are made floats in vector memory, piece by piece; for the gradient
        XLA makes all of them floats first.
      preferred_element_type: dtype of the result, bfloat16 or float32; that of `lhs` when None. Sums are kept
        in float32.
      activation: "silu", "gelu", "gelu_tanh", "relu" or "relu2"; with a gate, of the gate, and then also
        "swiglu_clamped", gpt-oss's ``(up + 1) * gate * sigmoid(alpha * gate)``, of values within `limit`, if any.
      gating: "concatenated": the first N/2 columns are the gates of the others; "interleaved": each even column is
        that of the odd one after it. None: no gate.
      alpha, limit: of "swiglu_clamped".

    Returns: [M, N], or [M, N/2] with a gate; zeros in rows past the groups. Differentiable in `lhs`, `bias`,
      and floats of `rhs` and `rhs_scale`.

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
    _check_index("group_sizes", group_sizes)
    groups = rhs.shape[0]
    k, n = (rhs.shape[2], rhs.shape[1]) if transpose_rhs else (rhs.shape[1], rhs.shape[2])
    if rhs_scale is None:
        _check(
            rhs.dtype == lhs.dtype,
            f"lhs is {lhs.dtype} and rhs is {rhs.dtype}; both must be the same, or rhs quantised with rhs_scale",
        )
    else:
        k = lhs.shape[1]
        check_quantised(("rhs", rhs), ("rhs_scale", rhs_scale), k, n, transposed=transpose_rhs)
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


def check_quantised(
    weights: tuple[str, Tensor], scale: tuple[str, Tensor], k: int, n: int, *, transposed: bool
) -> None:
    """Raises InputError unless weights with K and N, or N and K if `transposed`, are quantised, and their scale fits.

    Args:
      weights, scale: with the names that they have in the call.
    """
    (name, values), (scale_name, scales) = weights, scale
    shape, of, groups = tuple(values.shape), tuple(scales.shape), values.shape[0]
    if values.dtype == torch.int32:
        _check(
            scales.dtype == torch.uint8,
            f"{scale_name} is {scales.dtype}; int32 {name} is MXFP4, and needs the uint8 exponents of pack_mxfp4",
        )
        _check(
            not transposed,
            f"{name} is MXFP4, whose words have K before N; here it is said to have N before K",
        )
        words, exponents = (groups, packed_depth(k) // PER_WORD, n), (groups, exponents_of(k), n)
        _check(
            shape == words and of == exponents,
            f"{name} has shape {shape} and {scale_name} {of}; MXFP4 of K = {k} and N = {n} has words {words} and "
            f"exponents {exponents}, as pack_mxfp4 makes them",
        )
        return
    _check(
        values.dtype == torch.int8 and scales.dtype == torch.float32,
        f"{name} is {values.dtype} and {scale_name} {scales.dtype}; they must be int8 and float32, or for MXFP4, from "
        "pack_mxfp4, int32 and uint8",
    )
    expected = (groups, n, k) if transposed else (groups, k, n)
    _check(shape == expected, f"{name} has shape {shape}; with K = {k} and N = {n} it must be {expected}")
    parts = of[1] if scales.dim() == 3 else 1
    _check(
        of in ((groups, n), (groups, parts, n)),
        f"{scale_name} has shape {of}; for {groups} groups of {n} columns it must be {(groups, n)}, or "
        f"({groups}, B, {n}) for B parts of K",
    )
    _check(
        parts == 1 or (parts > 1 and k % (parts * LANES) == 0),
        f"{scale_name} has {parts} parts for K = {k}; their length must be a multiple of {LANES}",
    )


def _check_exponents(blocks: Tensor, scales: Tensor) -> None:
    if scales.dtype != torch.uint8 or tuple(blocks.shape) != (*scales.shape, 16):
        return  # the declaration refuses it
    # That of numbers which are all zero says nothing.
    scales = scales[(blocks & 0x77 != 0).any(dim=-1)]
    if scales.numel() == 0:
        return
    least, most = int(scales.min()), int(scales.max())
    _check(
        least >= LEAST_EXPONENT and most <= MOST_EXPONENT,
        f"scales are within {least}..{most}; a TPU has normal bfloat16 numbers for {LEAST_EXPONENT}..{MOST_EXPONENT}",
    )


@op(kernel=functions.pack_mxfp4, reference=quantised.pack_mxfp4, check_values=_check_exponents)
def pack_mxfp4(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Rewrites MXFP4 weights, as checkpoints store them, to the form that the kernels read. Nothing is lost.

    Once, when a model is loaded; the result can be saved like any tensors, for example with safetensors.

    Args:
      blocks: [G, N, K/32, 16] uint8: along K two E2M1 codes a byte, the first in the low bits, as in gpt-oss's
        ``gate_up_proj_blocks``.
      scales: [G, N, K/32] uint8: E8M0, the exponent of each 32 numbers plus 127, within 2..252 unless all
        of them are zero.

    Returns: words [G, K'/8, N] int32, with K' = K rounded up to 128, and exponents [G, B, N] uint8, with B = K/32
      rounded up to 32: `rhs` and `rhs_scale` of `ragged_dot`.

    Raises:
      InputError: shapes or dtypes do not fit; on the CPU also scales that are out of range. On a TPU these are taken
        as the nearest in it.

    Example:
      >>> blocks, scales = torch.full((1, 64, 4, 16), 0x22).byte(), torch.full((1, 64, 4), 127).byte()  # all 1.0
      >>> words, exponents = pack_mxfp4(blocks, scales)
      >>> ragged_dot(torch.ones(2, 128), words, torch.tensor([1]), rhs_scale=exponents)[:, 0]
      tensor([128.,   0.])
    """
    for name, tensor, rank, axes in (
        ("blocks", blocks, 4, "[G, N, K/32, 16]"),
        ("scales", scales, 3, "[G, N, K/32]"),
    ):
        _check_rank(name, tensor, rank, axes)
        _check(tensor.dtype == torch.uint8, f"{name} has dtype {tensor.dtype}; it must be uint8")
    _check(
        tuple(blocks.shape) == (*scales.shape, 16),
        f"blocks has shape {tuple(blocks.shape)}; with scales {tuple(scales.shape)} it must be {(*scales.shape, 16)}",
    )
    groups, n, count = scales.shape
    k = count * BLOCK
    words = blocks.new_empty((groups, packed_depth(k) // PER_WORD, n), dtype=torch.int32)
    return words, scales.new_empty((groups, exponents_of(k), n))


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
