"""The backend "tpu_kernels" in diffusers' dispatcher: small transformers with random weights against native."""

from __future__ import annotations

import logging

import diffusers
import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend

import tpu_kernels
from tpu_kernels.errors import IntegrationError
from tpu_kernels.integrations import diffusers as integration


def flux():
    model = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=24, pooled_projection_dim=20, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 36, 16),
        "encoder_hidden_states": torch.randn(2, 10, 24),
        "pooled_projections": torch.randn(2, 20),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.randint(0, 6, (36, 3)).float(),
        "txt_ids": torch.zeros(10, 3),
    }
    return model, inputs


def qwen_image():
    """The second text is padded: its mask has a gap between text and image."""
    model = diffusers.QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=24, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 5:] = False
    inputs = {
        "hidden_states": torch.randn(2, 36, 16),
        "encoder_hidden_states": torch.randn(2, 9, 24),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.tensor([0.3, 0.7]),
        "img_shapes": [[(1, 6, 6)]] * 2,
    }
    return model, inputs


def placed(value, device):
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.fixture(params=[flux, qwen_image], ids=["flux", "qwen-image"])
def transformer(request):
    torch.manual_seed(0)
    model, inputs = request.param()
    return model.eval(), inputs


def programs():
    kernel = tpu_kernels.get_kernel("tpu-kernels/attention", version=1)
    return sum(kernel.flash_attention.paths.values())


def test_outputs_are_those_of_the_native_backend(transformer, device):
    model, inputs = transformer

    def output(device):
        with torch.no_grad():
            return model(**{name: placed(value, device) for name, value in inputs.items()})[0].cpu()

    expected = output("cpu")
    model.to(device)
    assert tpu_kernels.enable_diffusers() == "tpu_kernels"
    before = programs()
    with attention_backend("tpu_kernels"):
        managed = output(device)
    assert programs() > before
    model.set_attention_backend("tpu_kernels")
    for actual in (managed, output(device)):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    tpu_kernels.disable()
    assert "tpu_kernels" not in {name.value for name in AttentionBackendName}
    if device == "cpu":
        torch.testing.assert_close(output(device), expected)


@pytest.mark.parametrize(
    ("mask", "extra", "reason"),
    [
        (torch.zeros(2, 1, 1, 20), {}, "one to be added"),
        (torch.ones(2, 1, 20, 20, dtype=torch.bool), {}, r"not one of keys, \[B, 1, 1, S\]"),
        (None, {"dropout_p": 0.5}, "dropout of 0.5"),
    ],
)
def test_what_the_kernel_cannot_do_takes_sdpa_and_says_why(mask, extra, reason, caplog):
    function = tpu_kernels.get_kernel("tpu-kernels/attention", version=1).dispatched_attention
    function.__globals__["log_once"].cache_clear()
    query, key, value = torch.randn(3, 2, 20, 2, 16)
    before = programs()
    with caplog.at_level(logging.INFO):
        assert function(query, key, value, mask, **extra).shape == query.shape
    assert programs() == before
    assert reason.replace("\\", "") in caplog.text


def test_a_model_past_the_dispatcher_is_told(caplog):
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, num_layers=1, attention_head_dim=8, num_attention_heads=2, caption_projection_dim=16,
        joint_attention_dim=16, pooled_projection_dim=16,
    )  # fmt: skip
    tpu_kernels.enable_diffusers(model)
    assert "SD3Transformer2DModel keeps its own attention" in caplog.text


def test_without_diffusers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "diffusers.models", None)
    with pytest.raises(IntegrationError, match=r"pip install 'tpu-kernels\[diffusers\]'"):
        integration.enable_diffusers()
