"""`enable` and `disable`: what transformers' experts modules may be like, and what the report says of them."""

from __future__ import annotations

import importlib
import itertools
import logging
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers.integrations import finegrained_fp8, moe
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

import tpu_kernels
from tpu_kernels.errors import IntegrationError
from tpu_kernels.integrations.transformers import EXPERTS, GROUPED_MM, ModuleReport

RAGGED_DOT = "tpu_ragged_dot"

T, K, E, H, I = 7, 2, 5, 64, 64  # noqa: E741  tokens, choices, experts, hidden and intermediate size


def clamped_gate(self, gate_up):
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    return (up.clamp(-7, 7) + 1) * gate * torch.sigmoid(gate * 1.7)


def make_experts(
    *,
    transposed=False,
    bias=False,
    gate=True,
    concatenated=True,
    norm=False,
    custom=False,
    act="silu",
    dtype,
    gate_function=None,
):
    """An experts module like those in transformers' models, decorated by transformers itself."""

    class SampleExperts(torch.nn.Module):
        def __init__(self, config):
            super().__init__()

            def parameter(*shape):
                return torch.nn.Parameter((torch.randn(E, *shape) / 8).to(dtype))

            def matrix(out, into):
                return parameter(into, out) if transposed else parameter(out, into)

            name = "gate_up_proj" if gate else "up_proj"
            columns = 2 * I if gate else I
            setattr(self, name, matrix(columns, H))
            self.down_proj = matrix(H, I)
            if bias:
                setattr(self, f"{name}_bias", parameter(columns))
                self.down_proj_bias = parameter(H)
            self.num_experts = E
            self.act_fn = transformers.activations.ACT2FN[act]
            if norm:
                self.post_expert_norm = torch.nn.RMSNorm(H).to(dtype)

        if custom or not concatenated or gate_function:
            _apply_gate = gate_function or clamped_gate

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise AssertionError("the module's own code was not to run")

    decorate = use_experts_implementation(
        is_concatenated=concatenated,
        is_transposed=transposed,
        has_bias=bias,
        has_gate=gate,
        has_post_expert_norm=norm,
    )
    return decorate(SampleExperts)(SimpleNamespace(_experts_implementation=EXPERTS))


FLAGS = [
    {"transposed": transposed, "bias": bias, **kind}
    for transposed, bias, kind in itertools.product(
        (False, True),
        (False, True),
        (
            {},
            {"act": "gelu_pytorch_tanh"},
            {"act": "gelu"},
            {"act": "relu"},
            {"act": "quick_gelu"},
            {"gate": False},
            {"gate": False, "act": "relu2"},
            {"concatenated": False},
            {"custom": True},
            {"norm": True},
        ),
    )
]


@pytest.mark.parametrize(
    "flags", FLAGS, ids=lambda f: "-".join(f"{k}={v}" for k, v in f.items() if v) or "plain"
)
@pytest.mark.parametrize(
    ("name", "router"),
    [(EXPERTS, torch.bfloat16), (RAGGED_DOT, torch.float32)],
    ids=["fused-bf16-router", "ragged-dot-f32-router"],
)
def test_every_flag_combination_agrees_with_transformers(flags, name, router, device):
    torch.manual_seed(0)
    tpu_kernels.enable()
    experts = make_experts(dtype=torch.float32, **flags)
    experts.config._experts_implementation = name
    experts._is_expert_parallel = True
    hidden = torch.randn(T, H)
    index = torch.randint(0, E + 1, (T, K))  # E is another rank's expert
    weights = torch.rand(T, K).masked_fill(index == E, 0).to(router)
    with torch.no_grad():
        expected = moe.batched_mm_experts_forward(experts, hidden, index, weights)
        actual = experts.to(device)(hidden.to(device), index.to(device), weights.to(device)).cpu()
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


def test_bfloat16_is_within_rounding(device):
    torch.manual_seed(0)
    tpu_kernels.enable()
    experts = make_experts(dtype=torch.bfloat16)
    hidden, index, weights = torch.randn(T, H), torch.randint(0, E, (T, K)), torch.rand(T, K)
    with torch.no_grad():
        actual = experts.to(device)(hidden.bfloat16().to(device), index.to(device), weights.to(device)).cpu()
        expected = moe.batched_mm_experts_forward(
            experts.cpu().double(), hidden.bfloat16().double(), index, weights.double()
        )
    assert (actual.double() - expected).norm() / expected.norm() <= 1e-2


def test_a_rank_without_work_returns_zeros(device):
    tpu_kernels.enable()
    experts = make_experts(dtype=torch.float32, bias=True, norm=True).to(device)
    hidden, index = torch.randn(T, H).to(device), torch.full((T, K), E).to(device)
    with torch.no_grad():
        out = experts(hidden, index, torch.zeros(T, K).to(device))
    assert not out.any()


def test_what_the_kernel_cannot_do_runs_the_models_own_code(device, caplog):
    tpu_kernels.enable()
    experts = make_experts(dtype=torch.float16).to(device)
    with caplog.at_level(logging.INFO), pytest.raises(AssertionError, match="own code"):
        experts(
            torch.ones(T, H).half().to(device),
            torch.zeros(T, K).long().to(device),
            torch.ones(T, K).to(device),
        )
    assert "float16" in caplog.text


def test_names_exist_before_loading_and_are_gone_after(folder, device):
    with pytest.raises(ValueError, match=EXPERTS):
        transformers.AutoModelForCausalLM.from_pretrained(folder("mixtral"), experts_implementation=EXPERTS)
    report = tpu_kernels.enable()
    assert report.registered == (EXPERTS, RAGGED_DOT, GROUPED_MM)
    assert not report.modules
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder("mixtral"), experts_implementation=EXPERTS
    )
    assert model.config._experts_implementation == EXPERTS
    tpu_kernels.disable()
    assert not set(report.registered) & set(ALL_EXPERTS_FUNCTIONS)


def test_disable_gives_a_model_its_former_experts_back(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder("mixtral"))
    before = model.get_experts_implementation()
    tpu_kernels.enable(model)
    tpu_kernels.enable(model)
    assert model.get_experts_implementation() != before
    tpu_kernels.disable(model)
    assert model.get_experts_implementation() == before
    assert EXPERTS in ALL_EXPERTS_FUNCTIONS


def small(config_class, **settings):
    return config_class(
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=2,
        num_hidden_layers=1,
        vocab_size=64,
        **settings,
    )


def test_models_that_compute_experts_in_place_are_named():
    config = small(
        transformers.Llama4TextConfig, num_local_experts=2, num_key_value_heads=2, head_dim=32,
        intermediate_size_mlp=64,
    )  # fmt: skip
    model = transformers.Llama4ForCausalLM(config)
    report = tpu_kernels.enable(model)
    assert {(m.kind, m.active) for m in report.modules} == {("Llama4TextExperts", False)}
    assert "Llama4TextExperts: transformers has no table for its experts" in str(report)
    assert model.config._experts_implementation != EXPERTS


def test_models_without_experts_are_told_so():
    config = small(transformers.LlamaConfig)
    report = tpu_kernels.enable(transformers.LlamaForCausalLM(config))
    assert "LlamaForCausalLM has no mixture-of-experts layers" in str(report)


def test_fp8_experts_keep_transformers_path(caplog):
    """A name that only the common table knows passes transformers' check and fails in the first FP8 forward."""
    tpu_kernels.enable()
    table = finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS
    assert {EXPERTS, RAGGED_DOT, GROUPED_MM} <= set(table)
    fallback = table[EXPERTS]
    with caplog.at_level(logging.WARNING), pytest.raises(AttributeError):
        fallback(torch.nn.Identity(), torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
    assert "no FP8 path" in caplog.text


def test_report_names_each_module_and_reads_well(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder("gpt-oss"))
    report = tpu_kernels.enable(model)
    assert report.modules[0] == ModuleReport("model.layers.0.mlp.experts", "GptOssExperts", True, "fused")
    assert "tpu-kernels/moe-experts v1 on" in str(report)
    assert "GptOssExperts: fused path of the kernel" in str(report)


GATED = [
    ("deepseek_v4", "DeepseekV4Experts", {"limit": 0.7}),
    ("gpt_oss", "GptOssExperts", {"limit": 0.7, "alpha": 1.7}),
    ("minimax_m3_vl", "MiniMaxM3VLExperts", {"swiglu_limit": 0.7, "swiglu_alpha": 1.7}),
    ("openai_privacy_filter", "OpenAIPrivacyFilterExperts", {"limit": 0.7, "alpha": 1.7}),
]


@pytest.mark.parametrize(("model", "kind", "settings"), GATED, ids=[model for model, *_ in GATED])
def test_known_gate_functions_compute_what_the_models_code_does(model, kind, settings, device):
    """The kernel has its own form of them, chosen by the module they are defined in."""
    torch.manual_seed(0)
    tpu_kernels.enable()
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    gate = getattr(modeling, kind)._apply_gate
    experts = make_experts(dtype=torch.float32, gate_function=gate)
    for name, value in settings.items():
        setattr(experts, name, value)
    hidden, index, weights = torch.randn(T, H), torch.randint(0, E, (T, K)), torch.rand(T, K)
    assert ALL_EXPERTS_FUNCTIONS[EXPERTS].explain(experts).name == "fused"
    with torch.no_grad():
        expected = moe.batched_mm_experts_forward(experts, hidden, index, weights)
        actual = experts.to(device)(hidden.to(device), index.to(device), weights.to(device)).cpu()
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("flags", "path", "reason"),
    [
        ({}, "fused", ""),
        ({"gate": False, "act": "relu2", "bias": True}, "fused", ""),
        ({"norm": True}, "composed", "its experts end in a norm"),
        ({"custom": True}, "composed", "it has a gate function of its own"),
        ({"act": "quick_gelu"}, "composed", "its activation is QuickGELUActivation"),
    ],
)
def test_report_tells_the_path_of_a_module_and_why(flags, path, reason):
    tpu_kernels.enable()
    explain = ALL_EXPERTS_FUNCTIONS[EXPERTS].explain
    told = explain(make_experts(dtype=torch.float32, **flags))
    assert (told.name, told.reason) == (path, reason)


def test_only_transformers_models_can_be_switched():
    with pytest.raises(IntegrationError, match="Linear is no transformers model"):
        tpu_kernels.enable(torch.nn.Linear(1, 1))


def test_unknown_experts_name_is_one_clear_error(folder):
    with pytest.raises(ValueError, match="no-such-experts"):
        transformers.AutoModelForCausalLM.from_pretrained(
            folder("mixtral"), experts_implementation="no-such-experts"
        )
