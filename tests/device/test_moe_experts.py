"""The shipped moe-experts kernel as a torch op, on the device that is there."""

from __future__ import annotations

import pytest
import torch

import tpu_kernels
from tpu_kernels.errors import TpuKernelsError

T, K, E, H, I = 6, 2, 4, 64, 32  # noqa: E741  tokens, choices, experts, hidden and intermediate size
GPT_OSS = {"interleaved": True, "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}


@pytest.fixture(scope="module")
def kernel():
    return tpu_kernels.get_kernel("tpu-kernels/moe-experts", version=1)


@pytest.fixture
def operands(device):
    """With gate, up and biases; 4 is another rank's expert."""
    index = torch.tensor([[0, 1], [1, 4], [3, 0], [4, 4], [1, 1], [0, 3]])
    shapes = [(E, 2 * I, H), (E, H, I), (E, 2 * I), (E, H)]
    return [t.to(device) for t in (torch.randn(T, H), index, torch.rand(T, K), *map(torch.randn, shapes))]


def test_opcheck(kernel, device, operands):
    checks = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if device == "cpu":
        checks.append("test_autograd_registration")
    operands = [t.requires_grad_(t.is_floating_point()) for t in operands]
    for given in (operands, operands[:5]):
        torch.library.opcheck(kernel.fused_experts._overload, tuple(given), test_utils=checks)


@pytest.mark.parametrize("biased", [True, False])
def test_compiles_to_one_graph_with_gradients(kernel, operands, backend, biased):
    index = operands.pop(1)
    floats = operands if biased else operands[:4]

    def layer(states, *others):
        return kernel.fused_experts(states * 2, index, *others, **GPT_OSS)

    def run(function):
        given = [t.detach().clone().requires_grad_() for t in floats]
        out = function(*given)
        out.sin().sum().backward()
        return out.detach(), *(t.grad for t in given)

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    torch.testing.assert_close(run(compiled), run(layer), atol=1e-4, rtol=1e-4)


def test_the_kernel_itself_runs(kernel, device, operands):
    """Interpreted on the emulated device, not its reference."""
    kernel.fused_experts(*operands)
    if device == "tpu":
        assert kernel.fused_experts.paths["reference"] == 0


def bad(**changes):
    named = {
        "hidden_states": torch.ones(T, H),
        "top_k_index": torch.zeros(T, K).long(),
        "top_k_weights": torch.ones(T, K),
        "gate_up_proj": torch.ones(E, 2 * I, H),
        "down_proj": torch.ones(E, H, I),
    }
    return {**named, **changes}


def test_a_shared_expert_is_what_it_is_alone_and_has_gradients(kernel, device, operands):
    states, index, weights, gate_up, down, *_ = operands
    share = torch.rand(T).to(device)
    given = [t.detach().clone().requires_grad_() for t in (states, gate_up[0] / 8, down[0] / 8, share)]

    def result(states, into, back, share):
        return kernel.fused_experts(
            states, index, weights, gate_up, down,
            shared_gate_up=into, shared_down=back, shared_weights=share,
        )  # fmt: skip

    def expected(states, into, back, share):
        gate, up = (states @ into.T).chunk(2, dim=1)
        alone = (torch.nn.functional.silu(gate) * up) @ back.T
        return kernel.fused_experts(states, index, weights, gate_up, down) + alone * share[:, None]

    def values(function):
        out = function(*given)
        return out.detach(), *torch.autograd.grad(out.sin().sum(), given)

    torch.testing.assert_close(values(result), values(expected), atol=1e-3, rtol=1e-3)


BAD = {
    "shared": (
        bad(shared_gate_up=torch.ones(2 * I, H), shared_down=torch.ones(I, H)),
        r"shared_gate_up has shape \(64, 64\).*\[U, H\] = \(128, 64\)",
    ),
    "half-shared": (bad(shared_down=torch.ones(H, I)), r"shared_gate_up and shared_down go together"),
    "rank": (bad(hidden_states=torch.ones(H)), r"hidden_states has shape \(64,\); it must have 2 axes"),
    "index": (bad(top_k_index=torch.ones(T, K)), r"top_k_index has dtype torch.float32; it must be int32"),
    "tokens": (bad(top_k_weights=torch.ones(T + 1, K)), r"top_k_weights has shape \(7, 2\).* = \(6, 2\)"),
    "layout": (bad(transposed=True), r"down_proj has shape \(4, 64, 32\).*\[E, I, H\] = \(4, 64, 64\)"),
    "gate": (bad(gated=False), r"gate_up_proj has shape \(4, 64, 64\).*\[E, U, H\] = \(4, 32, 64\)"),
    "dtypes": (
        bad(down_proj=torch.ones(E, H, I).bfloat16()),
        "down_proj is torch.bfloat16; it must be torch.float32",
    ),
    "scale": (bad(gate_up_scale=torch.ones(E, 2 * I)), r"down_scale go together; give both or none"),
    "words": (
        bad(
            gate_up_proj=torch.ones(E, 16, 2 * I, dtype=torch.int32),
            gate_up_scale=torch.zeros(E, 32, 2 * I).byte(),
            down_proj=torch.ones(E, 16, H, dtype=torch.int32),
            down_scale=torch.zeros(E, 32, H).byte(),
        ),
        "gate_up_proj is MXFP4, whose words have K before N",
    ),
    "dtype": (bad(hidden_states=torch.ones(T, H).half()), r"float16; supported: bfloat16 and float32"),
    "one bias": (bad(gate_up_bias=torch.ones(E, 2 * I)), r"go together; give both or none"),
    "bias": (
        bad(gate_up_bias=torch.ones(E, I), down_bias=torch.ones(E, H)),
        r"gate_up_bias has shape \(4, 32\).* = \(4, 64\)",
    ),
    "activation": (bad(activation="swish"), "'swish'; supported: gelu, gelu_tanh, relu, relu2, silu"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_clear_error(kernel, device, arguments, message):
    placed = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises(TpuKernelsError, match=message):
        kernel.fused_experts(**placed)
