"""Small models of the real transformers classes, with seeded weights: nothing to download, nothing trained.

Each keeps what makes its family different (expert layout, gate, biases, sinks, layer types, shared expert) at
a size that runs anywhere. Their text is noise; that two implementations produce the same noise is the point.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import BenchmarkError
from .tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, build_tokenizer

if TYPE_CHECKING:
    import torch

MAX_POSITIONS = 4096


@dataclass(frozen=True)
class Preset:
    """One small model.

    Attributes:
        name: What the command line calls it, as in ``--model preset:NAME``.
        summary: The family's traits that it keeps, in one line.
        model_type: The family's name in transformers.
        settings: Arguments of the family's config that differ from its defaults.
    """

    name: str
    summary: str
    model_type: str
    settings: Mapping[str, Any]


def _preset(name: str, summary: str, model_type: str, **settings: Any) -> Preset:
    common = {
        "vocab_size": VOCAB_SIZE,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "max_position_embeddings": MAX_POSITIONS,
    }
    return Preset(name, summary, model_type, MappingProxyType(common | settings))


_DELTA_NET = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            _preset(
                "qwen3-moe",
                "16 experts, top 4, a norm on each query and key head",
                "qwen3_moe",
                hidden_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=32,
                num_experts=16,
                num_experts_per_tok=4,
                moe_intermediate_size=64,
                norm_topk_prob=True,
            ),
            _preset(
                "mixtral",
                "8 wide experts, top 2, routing weights in float32",
                "mixtral",
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_local_experts=8,
                num_experts_per_tok=2,
            ),
            _preset(
                "gpt-oss",
                "8 experts, top 4, transposed, interleaved and biased; sliding and full attention with sinks",
                "gpt_oss",
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=32,
                num_local_experts=8,
                num_experts_per_tok=4,
                sliding_window=32,
                layer_types=["sliding_attention", "full_attention"] * 2,
                rope_parameters={"rope_type": "default", "rope_theta": 150_000.0},
            ),
            _preset(
                "gemma4",
                "16 experts, top 2, beside a dense layer; sliding and full attention of different head sizes",
                "gemma4_text",
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=32,
                global_head_dim=64,
                num_global_key_value_heads=1,
                attention_k_eq_v=True,
                sliding_window=32,
                layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                enable_moe_block=True,
                num_experts=16,
                top_k_experts=2,
                moe_intermediate_size=64,
                # The large checkpoints with experts have no per-layer embeddings.
                hidden_size_per_layer_input=0,
                vocab_size_per_layer_input=VOCAB_SIZE,
                final_logit_softcapping=30.0,
            ),
            _preset(
                "qwen3.5-moe",
                "32 experts, top 4, and a shared one; gated delta net and full attention",
                "qwen3_5_moe_text",
                hidden_size=64,
                num_experts=32,
                num_experts_per_tok=4,
                **_DELTA_NET,
            ),
            _preset(
                "qwen3-next",
                "8 experts, top 2, and a shared one; gated delta net and full attention, fused projections",
                "qwen3_next",
                hidden_size=64,
                num_experts=8,
                num_experts_per_tok=2,
                **_DELTA_NET,
            ),
        )
    }
)


def build(name: str, folder: str | Path, *, dtype: torch.dtype | None = None, seed: int = 0) -> Path:
    """Writes a preset's config, weights (safetensors) and tokenizer to `folder`, and returns it.

    The folder then loads like any other model. The same `name`, `dtype` and `seed` give the same weights.

    Args:
        name: One of `PRESETS`.
        folder: Where to; made if it is not there.
        dtype: Of the weights; float32 unless given.
        seed: Of the weights.

    Example:
        >>> folder = build("mixtral", "models/tiny-mixtral")
        >>> model = AutoModelForCausalLM.from_pretrained(folder)
    """
    preset = PRESETS.get(name)
    if preset is None:
        raise BenchmarkError(f"there is no preset {name!r}; choose one of {', '.join(PRESETS)}")

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(preset.model_type, **preset.settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomise(model, seed)
    folder = Path(folder)
    model.to(dtype or torch.float32).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def build_mxfp4(folder: str | Path, *, seed: int = 0) -> Path:
    """Writes the gpt-oss preset with MXFP4 experts, in the form of openai/gpt-oss-20b's files, and returns `folder`.

    Example:
        >>> folder = build_mxfp4("models/tiny-gpt-oss-mxfp4")
        >>> model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="tpu_fused_experts")
    """
    import json

    import torch
    from safetensors.torch import load_file, save_file

    folder = build("gpt-oss", folder, seed=seed)
    config = json.loads((folder / "config.json").read_text())
    whole = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": whole}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)

    def draw(least: int, above: int, *shape: int) -> torch.Tensor:
        return torch.randint(least, above, shape, dtype=torch.uint8, generator=generator)

    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, k, n = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = draw(0, 256, experts, n, k // 32, 16)
        tensors[f"{name}_scales"] = draw(119, 123, experts, n, k // 32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Gives every parameter seeded noise, at a scale where tokens vary and every parameter matters.

    The families' own initialisation is meant for training: its biases of zero would hide a lost bias, and its
    small matrices leave greedy decoding in a loop of one or two tokens after a few steps. Large matrices
    beside a small embedding make the layers, hence the whole context, decide each token. Each parameter has a
    generator of its own, so its values do not depend on the order in which transformers lists them.
    """
    import torch

    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.1 * noise)
            else:
                gain = 0.25 if parameter is embedding else 2.0
                parameter.copy_(noise * gain * parameter.shape[-1] ** -0.5)
