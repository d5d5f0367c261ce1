"""Layers in the place of transformers' norms, put there by stock `kernels`; on the device that is there."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm

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
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*grads)
