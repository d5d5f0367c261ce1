"""The shipped ragged-dot kernel as torch ops, on the device that is there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tpu_kernels.errors import TpuKernelsError

from .conftest import relative_l2

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def reference(lhs, rhs, sizes, offset=0, *, transpose_rhs=False):
    """float64, differentiable."""
    rhs = rhs.double().transpose(1, 2) if transpose_rhs else rhs.double()
    pieces = lhs.double().split([*sizes, lhs.shape[0] - sum(sizes)])
    here = range(offset, offset + rhs.shape[0])
    return torch.cat(
        [
            piece @ rhs[i - offset] if i in here else torch.zeros(piece.shape[0], rhs.shape[2]).double()
            for i, piece in enumerate(pieces)
        ]
    )


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    groups=st.sampled_from([3, 2]),
    extra=st.integers(0, 4),
    axes=st.sampled_from([(64, 128), (100, 36)]),
    transpose_rhs=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
    data=st.data(),
)
def test_agrees_with_float64(kernel, device, sizes, groups, extra, axes, transpose_rhs, dtype, data):
    k, n = axes
    m = max(sum(sizes), 20) + extra // 4 * 13
    offset = data.draw(st.integers(0, 3 - groups))
    shape = (groups, n, k) if transpose_rhs else (groups, k, n)
    lhs, rhs, grad = (torch.randn(s).to(dtype) for s in ((m, k), shape, (m, n)))

    def run(function, device, **static):
        left, right = (t.clone().to(device).requires_grad_() for t in (lhs, rhs))
        out = function(left, right, transpose_rhs=transpose_rhs, **static)
        out.backward(grad.to(device, out.dtype))
        return out, left.grad, right.grad

    expected = run(lambda left, right, **kw: reference(left, right, sizes, offset, **kw), "cpu")
    actual = run(
        lambda left, right, **kw: kernel.ragged_dot(left, right, torch.tensor(sizes, device=device), **kw),
        device,
        group_offset=torch.tensor([offset], device=device),
    )
    for a, e in zip(actual, expected, strict=True):
        assert relative_l2(a, e) <= TOLERANCE[dtype]


def test_compiles_to_one_graph_with_gradients(kernel, device, backend):
    lhs, rhs = torch.randn(16, 64).to(device), torch.randn(4, 96, 64).to(device)
    sizes = torch.tensor([4, 0, 7, 3], device=device)

    def run(function):
        left, right = lhs.clone().requires_grad_(), rhs.clone().requires_grad_()
        function(left, right).sin().sum().backward()
        return left.grad, right.grad

    def product(left, right):
        return kernel.ragged_dot(left * 2, right, sizes, transpose_rhs=True)

    compiled = torch.compile(product, backend=backend, fullgraph=True)
    torch.testing.assert_close(run(compiled), run(product))


@pytest.mark.parametrize("gating", ["concatenated", "interleaved"])
def test_bias_and_gate_agree_with_torch(kernel, device, gating):
    lhs, rhs, bias = torch.randn(24, 64), torch.randn(3, 256, 64) / 8, torch.randn(3, 256)
    sizes, grad = [9, 0, 12], torch.randn(24, 128)

    def apart(left, right, added):
        before = reference(left, right, sizes, transpose_rhs=True)
        before = before + added.double()[torch.repeat_interleave(torch.arange(3), torch.tensor([9, 0, 15]))]
        interleaved = gating == "interleaved"
        gate, up = (before[:, 0::2], before[:, 1::2]) if interleaved else before.chunk(2, dim=1)
        return torch.where((torch.arange(24) < 21)[:, None], torch.nn.functional.silu(gate) * up, 0)

    def fused(left, right, added):
        static = {"transpose_rhs": True, "activation": "silu", "gating": gating}
        return kernel.ragged_dot(left, right, torch.tensor(sizes).to(device), bias=added, **static)

    def run(function, device):
        tensors = [t.clone().to(device).requires_grad_() for t in (lhs, rhs, bias)]
        out = function(*tensors)
        out.backward(grad.to(device, out.dtype))
        return out, *(t.grad for t in tensors)

    for a, e in zip(run(fused, device), run(apart, "cpu"), strict=True):
        assert relative_l2(a, e) <= TOLERANCE[torch.float32]


def quantised(kind, device):
    """Weights [3, 128, 64] and scale, with what tells of their layout, and their values."""
    if kind == "int8":
        weights, scale = torch.randint(-127, 128, (3, 64, 128), dtype=torch.int8), torch.rand(3, 64) / 500
        values = (weights * scale[:, :, None]).transpose(1, 2)
        return weights.to(device), scale.to(device), {"transpose_rhs": True}, values
    blocks = torch.randint(0, 256, (3, 64, 4, 16), dtype=torch.uint8)
    scales = torch.randint(119, 123, (3, 64, 4), dtype=torch.uint8)
    return (
        blocks.to(device),
        scales.to(device),
        {},
        convert_moe_packed_tensors(blocks, scales, dtype=torch.float32),
    )


@pytest.mark.parametrize("kind", ["int8", "mxfp4"])
def test_quantised_weights_agree_with_their_values(kernel, device, backend, kind):
    weights, scale, layout, values = quantised(kind, device)
    if kind == "mxfp4":
        weights, scale = kernel.pack_mxfp4(weights, scale)
    lhs, sizes = torch.randn(24, 128), [9, 0, 12]

    def product(left):
        return kernel.ragged_dot(left, weights, torch.tensor(sizes, device=device), rhs_scale=scale, **layout)

    def run(function, device):
        left = lhs.clone().to(device).requires_grad_()
        out = function(left)
        out.sin().sum().backward()
        return out, left.grad

    expected = run(lambda left: reference(left, values, sizes), "cpu")
    for function in (product, torch.compile(product, backend=backend, fullgraph=True)):
        for a, e in zip(run(function, device), expected, strict=True):
            assert relative_l2(a, e) <= TOLERANCE[torch.float32]


def test_packed_weights_survive_a_file(kernel, device, tmp_path):
    blocks, scales, _, values = quantised("mxfp4", device)
    words, exponents = kernel.pack_mxfp4(blocks, scales)
    save_file({"words": words.cpu(), "exponents": exponents.cpu()}, tmp_path / "weights.safetensors")
    read = {name: t.to(device) for name, t in load_file(tmp_path / "weights.safetensors").items()}
    identity, sizes = torch.eye(128).to(device), torch.tensor([0, 128, 0], device=device)
    out = kernel.ragged_dot(identity, read["words"], sizes, rhs_scale=read["exponents"])
    torch.testing.assert_close(out.cpu(), values[1], rtol=0, atol=0)


def test_no_rows_at_all(kernel, device):
    out = kernel.ragged_dot(
        torch.empty(0, 64).to(device), torch.ones(2, 64, 64).to(device), torch.tensor([0, 0]).to(device)
    )
    assert out.shape == (0, 64)


@pytest.mark.parametrize("op", ["ragged_dot", "experts"])
def test_opcheck(kernel, device, op):
    checks = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if device == "cpu":
        checks.append("test_autograd_registration")
    inputs = {
        "ragged_dot": [torch.randn(8, 64), torch.randn(2, 64, 64), torch.tensor([3, 4])],
        "experts": [
            torch.randn(3, 64),
            torch.tensor([[0, 1], [1, 2], [2, 0]]),
            torch.rand(3, 2),
            torch.randn(3, 128, 64),
            torch.randn(3, 64, 64),
        ],
    }[op]
    inputs = [t.to(device).requires_grad_(t.is_floating_point()) for t in inputs]
    torch.library.opcheck(getattr(kernel, op)._overload, tuple(inputs), test_utils=checks)


LHS, RHS, SIZES = torch.ones(16, 64), torch.ones(4, 32, 64), torch.tensor([4, 4, 0, 5])
BAD = {
    "rank": ((LHS[0], RHS, SIZES), {}, r"lhs has shape \(64,\); it must have 2 axes"),
    "contraction": ((LHS, RHS, SIZES), {"transpose_rhs": False}, r"lhs has K = 64 but rhs.* has K = 32"),
    "dtypes": ((LHS, RHS.bfloat16(), SIZES), {}, r"lhs is torch.float32 and rhs is torch.bfloat16"),
    "dtype": ((LHS.half(), RHS.half(), SIZES), {}, r"float16; supported: bfloat16 and float32"),
    "sizes dtype": ((LHS, RHS, SIZES.float()), {}, r"group_sizes has dtype torch.float32; it must be int32"),
    "sizes length": ((LHS, RHS, SIZES[:2]), {}, r"group_sizes has 2 entries but rhs has 4 groups"),
    "result dtype": ((LHS, RHS, SIZES), {"preferred_element_type": torch.float16}, r"float16; supported"),
    "offset": (
        (LHS, RHS, SIZES),
        {"group_offset": torch.tensor([1, 2])},
        r"group_offset has 2 values; it must be one",
    ),
    "bias": (
        (LHS, RHS, SIZES),
        {"bias": torch.ones(4, 31)},
        r"bias has shape \(4, 31\);.* it must be \(4, 32\)",
    ),
    "gating": ((LHS, RHS, SIZES), {"gating": "halves"}, r"gating is 'halves'; supported"),
    "no gate's activation": (
        (LHS, RHS, SIZES),
        {"activation": "swiglu_clamped"},
        r"with gating=None supported",
    ),
    "no activation": ((LHS, RHS, SIZES), {"gating": "interleaved"}, r"activation is None; with gating"),
}
INT8, WORDS = RHS.to(torch.int8), torch.zeros(4, 16, 32, dtype=torch.int32)
BAD |= {
    "no scale": ((LHS, INT8, SIZES), {}, r"rhs is torch.int8; both must be the same, or rhs quantised"),
    "scale": ((LHS, INT8, SIZES), {"rhs_scale": torch.ones(4, 31)}, r"shape \(4, 31\);.* \(4, 32\)"),
    "parts": ((LHS, INT8, SIZES), {"rhs_scale": torch.ones(4, 2, 32)}, r"has 2 parts for K = 64; .* of 128"),
    "int8 with exponents": (
        (LHS, INT8, SIZES),
        {"rhs_scale": torch.zeros(4, 32, 32).byte()},
        r"rhs is torch.int8 and rhs_scale torch.uint8; they must be int8 and float32",
    ),
    "transposed words": (
        (LHS, WORDS, SIZES),
        {"rhs_scale": torch.zeros(4, 32, 32).byte()},
        r"rhs is MXFP4, whose words have K before N",
    ),
    "words of another K": (
        (torch.ones(16, 256), WORDS, SIZES),
        {"rhs_scale": torch.zeros(4, 32, 32).byte(), "transpose_rhs": False},
        r"rhs has shape \(4, 16, 32\).*has words \(4, 32, 32\) and exponents \(4, 32, 32\)",
    ),
}
BAD_VALUES = {
    "negative": ((LHS, RHS, torch.tensor([-1, 4, 4, 4])), {}, r"group_sizes holds -1"),
    "sum": ((LHS, RHS, torch.tensor([9, 4, 4, 4])), {}, r"sum to 21, but lhs has 16 rows"),
    "offset": ((LHS, RHS, SIZES), {"group_offset": torch.tensor(2)}, r"group_offset is 2.*within 0\.\.0"),
}


@pytest.mark.parametrize(("tensors", "static", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_clear_error(kernel, device, tensors, static, message):
    static = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in static.items()}
    with pytest.raises(TpuKernelsError, match=message):
        kernel.ragged_dot(*(t.to(device) for t in tensors), **{"transpose_rhs": True, **static})


@pytest.mark.parametrize(("tensors", "static", "message"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_bad_values_are_refused_where_they_are_at_hand(kernel, tensors, static, message):
    with pytest.raises(TpuKernelsError, match=message):
        kernel.ragged_dot(*tensors, transpose_rhs=True, **static)


def test_exponents_that_bfloat16_has_no_numbers_for_are_refused(kernel):
    blocks, scales = (
        torch.full((1, 64, 4, 16), 0x20).byte(),
        torch.tensor([1, 5, 9, 255]).byte().expand(1, 64, 4),
    )
    with pytest.raises(TpuKernelsError, match=r"scales are within 1\.\.255; .* for 2\.\.252"):
        kernel.pack_mxfp4(blocks, scales)
    blocks[:, :, [0, 3]] = 0x80  # zeros, of which the exponent says nothing
    kernel.pack_mxfp4(blocks, scales)
    with pytest.raises(TpuKernelsError, match=r"blocks has shape .*; with scales \(1, 64, 3\)"):
        kernel.pack_mxfp4(blocks, torch.full((1, 64, 3), 9).byte())


def test_unknown_activation(kernel, device):
    arguments = [torch.ones(1, 64), torch.zeros(1, 1).long(), torch.ones(1, 1), torch.ones(1, 128, 64)]
    arguments.append(torch.ones(1, 64, 64))
    with pytest.raises(TpuKernelsError, match="'swish'; supported: gelu, gelu_tanh, relu, relu2, silu"):
        kernel.experts(*(t.to(device) for t in arguments), activation="swish")
