"""A gpt-oss checkpoint with MXFP4 weights, as the Hub has them: what is loaded is what is stored, and computes so."""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors import safe_open
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

import tpu_kernels
from tpu_kernels.bench import presets
from tpu_kernels.errors import TpuKernelsError
from tpu_kernels.integrations.transformers import EXPERTS

WEIGHTS = ("gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def kernel():
    return tpu_kernels.get_kernel("tpu-kernels/moe-experts", version=1)


def stored(n, k, experts=8):
    shape = (experts, n, k // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    return blocks, torch.randint(119, 123, shape, dtype=torch.uint8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return presets.build_mxfp4(tmp_path_factory.mktemp("mxfp4"))


def load(folder, **kwargs):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **kwargs
    ).eval()


def greedy(model, prompt):
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, eos_token_id=None
    ).cpu()


def test_a_checkpoint_keeps_its_bits_and_the_model_its_tokens(checkpoint, kernel, device, tmp_path):
    prompt = torch.randint(5, 200, (2, 12))
    own = load(checkpoint, experts_implementation="eager")  # transformers dequantises
    tpu_kernels.enable()
    model = load(checkpoint, experts_implementation=EXPERTS, device_map=device)

    experts = model.model.layers[1].mlp.experts
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        for name in WEIGHTS:
            blocks, scales = (
                file.get_tensor(f"model.layers.1.mlp.experts.{name}_{kind}") for kind in ("blocks", "scales")
            )
            held = getattr(experts, name), getattr(experts, f"{name}_scale")
            for found, expected in zip(held, kernel.pack_mxfp4(blocks, scales), strict=True):
                assert torch.equal(found.cpu(), expected)
    assert {m.path for m in tpu_kernels.enable(model).modules} == {"fused"}
    with torch.no_grad():
        expected = own(prompt).logits
        assert (model(prompt.to(device)).logits.cpu() - expected).abs().max() <= 1e-4 * expected.abs().max()
    tokens = greedy(model, prompt.to(device))
    assert torch.equal(tokens, greedy(own, prompt))
    assert len(set(tokens[0, 12:].tolist())) > 3, "a constant output proves nothing"

    model.save_pretrained(tmp_path)

    again = load(tmp_path, experts_implementation=EXPERTS)
    held = again.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(held[name], tensor.cpu()), name
    with pytest.raises(RuntimeError, match="mismatch"):
        load(tmp_path, experts_implementation="eager")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if name.endswith(("_blocks", "_scales"))]  # noqa: SIM118


def test_a_model_that_others_compute_is_dequantised_as_before(checkpoint):
    name = "model.layers.0.mlp.experts.down_proj"
    before = load(checkpoint, experts_implementation="eager").get_parameter(name)
    tpu_kernels.enable()
    asked = transformers.Mxfp4Config(dequantize=True)
    for kwargs in ({}, {"experts_implementation": EXPERTS, "quantization_config": asked}):
        assert torch.equal(load(checkpoint, **kwargs).get_parameter(name), before)
    tpu_kernels.disable()
    assert AUTO_QUANTIZER_MAPPING["mxfp4"].__module__.startswith("transformers.")


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
