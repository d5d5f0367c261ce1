"""Layers in the place of transformers' own, put there by stock `kernels`; on the device that is there."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.laguna.configuration_laguna import LagunaConfig
from transformers.models.laguna.modeling_laguna import LagunaTopKRouter
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm, Qwen3_5MoeTopKRouter

import tpu_kernels
from tpu_kernels.integrations.layers import register_layers

kernels = pytest.importorskip("kernels")


@pytest.fixture(autouse=True)
def _stock_knows_the_device(monkeypatch):
    # By this attribute, which torch_tpu does not set.
    monkeypatch.setattr(torch.backends, "tpu", ModuleType("torch.backends.tpu"), raising=False)
    with kernels.use_kernel_mapping({}):  # what a test registers goes with it
        yield


@pytest.mark.parametrize(
    ("name", "own"), [("RMSNorm", LlamaRMSNorm), ("RMSNormZeroCentered", Qwen3_5MoeRMSNorm)]
)
def test_a_norm_of_transformers_is_replaced_and_computes_the_same(name, own, device):
    assert name in register_layers()

    class Norm(own):
        pass

    kernels.replace_kernel_forward_from_hub(Norm, name)
    norm, model = own(130), torch.nn.Sequential(Norm(130))
    with torch.no_grad():
        norm.weight.normal_()
        model[0].weight.copy_(norm.weight)
    model = kernels.kernelize(model.to(device), mode=kernels.Mode.TRAINING, device="tpu", use_fallback=False)
    assert model[0].forward.__func__.__module__.startswith("_rms_norm_tpu_")
    x = torch.randn(3, 5, 130)
    results, grads = [], []
    for module, place in ((norm, "cpu"), (model, device)):
        given = x.detach().to(place).requires_grad_()
        result = module(given)
        result.sin().sum().backward()
        results.append(result.detach().cpu())
        grads.append((given.grad.cpu(), next(module.parameters()).grad.cpu()))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


QWEN = Qwen3_5MoeTextConfig(hidden_size=40, num_experts=24, num_experts_per_tok=5)
LAGUNA = LagunaConfig(hidden_size=40, num_experts=24, num_experts_per_tok=5, moe_router_logit_softcapping=3.0)


@pytest.mark.parametrize(("own", "config"), [(Qwen3_5MoeTopKRouter, QWEN), (LagunaTopKRouter, LAGUNA)])
def test_a_router_of_transformers_is_replaced_and_computes_the_same(own, config, device):
    assert "SoftmaxTopKRouter" in register_layers()

    class Router(own):
        pass

    kernels.replace_kernel_forward_from_hub(Router, "SoftmaxTopKRouter")
    router, model = own(config), torch.nn.Sequential(Router(config))
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_()
    model[0].load_state_dict(router.state_dict())
    model = kernels.kernelize(model.to(device), mode=kernels.Mode.TRAINING, device="tpu", use_fallback=False)
    assert model[0].forward.__func__.__module__.startswith("_router_tpu_")
    x, results, grads = torch.randn(7, 40), [], []
    for module, place in ((router, "cpu"), (model, device)):
        given = x.clone().to(place).requires_grad_()
        logits, weights, index = module(given)
        (weights.sin().sum() + logits.cos().sum()).backward()
        results.append([each.detach().cpu() for each in (logits, weights, index)])
        grads.append([given.grad.cpu(), next(module.parameters()).grad.cpu()])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("modeling", "width"), [(modeling_qwen3, 16), (modeling_gpt_oss, 8)])
def test_the_rotation_of_transformers_is_replaced_and_computes_the_same(modeling, width, device):
    """gpt-oss's tables have one half only."""
    assert "rotary_pos_emb" in register_layers()

    @kernels.use_kernel_forward_from_hub(
        "rotary_pos_emb"
    )  # as the model's own, which is there once for all tests
    def rotation(q, k, cos, sin, unsqueeze_dim=1):
        return modeling.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)

    model = torch.nn.Sequential(rotation)
    model = kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="tpu", use_fallback=False)
    assert model[0].forward.__func__.__module__.startswith("_rotary_tpu_")
    q, k, cos, sin = torch.randn(2, 4, 5, 16), torch.randn(2, 1, 5, 16), *torch.randn(2, 1, 5, width)
    found = []
    for function, place in ((modeling.apply_rotary_pos_emb, "cpu"), (model[0], device)):
        given = [each.clone().to(place).requires_grad_() for each in (q, k)]
        results = function(*given, cos.to(place), sin.to(place))
        sum(each.sin().sum() for each in results).backward()
        found.append([each.detach().cpu() for each in (*results, *(each.grad for each in given))])
    torch.testing.assert_close(*found)


class GatedMLP(torch.nn.Module):
    """Its halves multiplied, one of them through SiLU."""

    def forward(self, x):
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up


def test_a_gated_activation_is_replaced_and_computes_the_same(device):
    assert {"SiluAndMul", "GeluAndMul", "GeluTanhAndMul"} <= set(register_layers())
    kernels.replace_kernel_forward_from_hub(GatedMLP, "SiluAndMul")
    model = torch.nn.Sequential(GatedMLP())
    model = kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="tpu", use_fallback=False)
    assert model[0].forward.__func__.__module__.startswith("_gated_activation_tpu_")
    x, found = torch.randn(3, 5, 256), []
    for module, place in ((GatedMLP(), "cpu"), (model, device)):
        given = x.clone().to(place).requires_grad_()
        result = module(given)
        result.sin().sum().backward()
        found.append([result.detach().cpu(), given.grad.cpu()])
    torch.testing.assert_close(*found)


def test_enable_replaces_a_models_layers_and_disable_gives_them_back(device, monkeypatch):
    config = modeling_qwen3.Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = modeling_qwen3.Qwen3ForCausalLM(config).eval()
    tokens = torch.randint(0, 64, (2, 7))
    expected = model(tokens).logits.detach()
    model.to(device)
    if not hasattr(modeling_qwen3.Qwen3RMSNorm, "kernel_layer_name"):
        report = tpu_kernels.enable(model, layers=True)
        assert "no layer of Qwen3ForCausalLM is kernelizable" in str(report)
        # As transformers marks it where it knows the version of stock.
        monkeypatch.setattr(modeling_qwen3.Qwen3RMSNorm, "kernel_layer_name", "RMSNorm", raising=False)

    report = tpu_kernels.enable(model, layers=True)
    assert "9 x RMSNorm" in report.layers
    norm = model.model.norm
    assert norm.forward.__func__.__module__.startswith("_rms_norm_tpu_")
    with torch.no_grad():
        torch.testing.assert_close(model(tokens.to(device)).logits.cpu(), expected, rtol=1e-4, atol=1e-4)
    tpu_kernels.disable(model)
    assert norm.forward.__func__ is modeling_qwen3.Qwen3RMSNorm.forward
