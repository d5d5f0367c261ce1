"""What a chip has of a model, by transformers' own plans."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tpu_kernels.errors import ProjectionError
from tpu_kernels.projection.config import read_config
from tpu_kernels.projection.layers import layer_kinds
from tpu_kernels.projection.plan import parse_plan
from tpu_kernels.projection.sharding import shard


def on_meta(folder, **changes):
    config = AutoConfig.for_model(**{**read_config(folder), **changes})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def shapes(layer):
    return {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}


def exchanged(collectives, layer):
    return [(c.module.partition(layer)[2], c.chips) for c in collectives if layer in c.module]


def test_expert_parallelism_keeps_attention_whole(configs):
    model = on_meta(configs / "qwen3-30b-a3b")
    collectives = shard(model, parse_plan("ep8"))
    layer = shapes(model.model.layers[0])
    assert layer["mlp.experts.gate_up_proj"] == (16, 1536, 2048)
    assert layer["mlp.experts.down_proj"] == (16, 2048, 768)
    assert layer["self_attn.k_proj.weight"] == (512, 2048)
    assert exchanged(collectives, "layers.0.") == [("mlp.experts", 8)]


def test_a_mixed_plan_splits_heads_and_experts(configs):
    model = on_meta(configs / "qwen3-30b-a3b")
    collectives = shard(model, parse_plan("tp4ep2"))
    layer = shapes(model.model.layers[0])
    assert layer["mlp.experts.gate_up_proj"] == (64, 384, 2048)
    assert layer["mlp.experts.down_proj"] == (64, 2048, 192)
    assert layer["self_attn.q_proj.weight"] == (1024, 2048)
    assert layer["self_attn.k_proj.weight"] == (128, 2048)
    assert layer["self_attn.o_proj.weight"] == (2048, 1024)
    assert exchanged(collectives, "layers.0.") == [("self_attn.o_proj", 4), ("mlp.experts", 8)]
    assert shapes(model)["lm_head.weight"] == (151936 // 4, 2048)


def test_a_models_own_plan_for_experts_may_split_more(configs):
    model = on_meta(configs / "gemma-4-26b-a4b")
    collectives = shard(model, parse_plan("ep8"))
    layer = shapes(model.model.layers[0])
    assert layer["experts.down_proj"] == (16, 2816, 704)
    assert layer["mlp.down_proj.weight"] == (2816, 264)
    assert exchanged(collectives, "layers.0.") == [("mlp.down_proj", 8), ("experts", 8)]


@pytest.mark.parametrize(
    ("folder", "plan", "message"),
    [
        (
            "qwen3-30b-a3b",
            "tp8",
            r"the 4 key-value heads of self_attn cannot be split over 8.*ep8, or tp4ep2",
        ),
        (
            "gemma-4-26b-a4b",
            "tp8",
            r"the 2 key-value heads of self_attn cannot be split over 8.*ep8, or tp2ep4",
        ),
        ("qwen3-30b-a3b", "ep3", "128 experts cannot be split over 3 chips"),
    ],
)
def test_an_impossible_split_says_what_is_possible(configs, folder, plan, message):
    with pytest.raises(ProjectionError, match=message):
        shard(on_meta(configs / folder), parse_plan(plan))


def test_layers_that_run_the_same_program_are_one_kind(configs):
    kinds = layer_kinds(on_meta(configs / "gemma-4-26b-a4b"))
    assert [(kind.name, kind.count, kind.window) for kind in kinds] == [
        ("sliding_attention", 25, 1024),
        ("full_attention", 5, None),
    ]


def test_layers_without_keys_are_refused(tmp_path):
    config = AutoConfig.for_model("qwen3_next", num_hidden_layers=4, hidden_size=64)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ProjectionError, match="is 'linear_attention'; only full_attention and"):
        layer_kinds(model)
