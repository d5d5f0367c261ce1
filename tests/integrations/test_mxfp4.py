"""A gpt-oss model with MXFP4 weights, as its checkpoints store them, against transformers' dequantisation."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import tpu_kernels
from tpu_kernels.errors import TpuKernelsError


@pytest.fixture(scope="module")
def kernel():
    return tpu_kernels.get_kernel("tpu-kernels/moe-experts", version=1)


def stored(n, k, experts=8):
    shape = (experts, n, k // 32)
    return torch.randint(0, 256, (*shape, 16), dtype=torch.uint8), torch.randint(
        119, 123, shape, dtype=torch.uint8
    )


def test_the_model_computes_what_its_dequantised_weights_do(kernel, folder, device):
    torch.manual_seed(0)
    own = transformers.AutoModelForCausalLM.from_pretrained(
        folder("gpt-oss"), attn_implementation="eager", experts_implementation="eager"
    ).eval()
    model = copy.deepcopy(own)
    for layer, packed in zip(own.model.layers, model.model.layers, strict=True):
        inner, hidden = layer.mlp.experts.down_proj.shape[1:]
        gate_up, down = stored(2 * inner, hidden), stored(hidden, inner)
        for name, weights in (("gate_up_proj", gate_up), ("down_proj", down)):
            values = convert_moe_packed_tensors(*weights, dtype=torch.float32)
            getattr(layer.mlp.experts, name).data = values
        kernel.use_mxfp4(packed.mlp.experts, gate_up, down)
    model = model.to(device)

    report = tpu_kernels.enable(model)

    assert {m.path for m in report.modules} == {"fused"}
    assert model.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.int32
    prompt = torch.randint(5, 200, (2, 12))
    with torch.no_grad():
        expected = own(prompt).logits
        assert (model(prompt.to(device)).logits.cpu() - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_what_does_not_fit_is_one_clear_error(kernel, folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder("gpt-oss"))
    experts = model.model.layers[0].mlp.experts
    with pytest.raises(
        TpuKernelsError, match=r"gate_up_proj has scales of shape \(8, 64, 2\).*\(8, 128, 2\)"
    ):
        kernel.use_mxfp4(experts, stored(64, 64), stored(64, 64))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder("qwen3-moe"))
    with pytest.raises(TpuKernelsError, match="cannot have MXFP4 weights"):
        kernel.use_mxfp4(model.model.layers[0].mlp.experts, stored(64, 64), stored(64, 64))
