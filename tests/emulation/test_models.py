"""Unmodified transformers models on the emulated device choose the tokens that they choose on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from tpu_kernels import emulation

if not emulation.is_active():
    pytest.skip("needs TPU_KERNELS_EMULATE=1", allow_module_level=True)

import torch
import transformers

pytestmark = pytest.mark.device

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    ("config", "attention", "cache"),
    [
        (transformers.Qwen3MoeConfig(**SMALL, num_experts=8, moe_intermediate_size=32), "sdpa", "static"),
        (transformers.MixtralConfig(**SMALL, num_local_experts=4, sliding_window=None), "sdpa", "dynamic"),
        (transformers.GptOssConfig(**SMALL, num_local_experts=4), "eager", "dynamic"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_same_tokens_as_on_the_cpu(config: Any, attention: str, cache: str) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    prompts = torch.tensor([[1, 5, 9, 2, 7], [0, 0, 8, 1, 4]])

    def generate(device: str) -> list[list[int]]:
        inputs = {"input_ids": prompts, "attention_mask": (prompts > 0).long()}
        tokens = model.to(device).generate(
            **{name: tensor.to(device) for name, tensor in inputs.items()},
            max_new_tokens=4,
            do_sample=False,
            cache_implementation=cache,
            pad_token_id=0,
            eos_token_id=None,
        )
        return tokens.tolist()

    assert generate("tpu") == generate("cpu")
