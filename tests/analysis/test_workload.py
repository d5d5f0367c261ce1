from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_kernels import get_kernel
from tpu_kernels.analysis.target import parse_target
from tpu_kernels.analysis.workload import find_cases, kernel_cases, models, parse_workload
from tpu_kernels.errors import AnalysisError


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    return get_kernel("tpu-kernels/ragged-dot", version=1)


@given(st.sampled_from(models()), st.integers(1, 200))
def test_each_token_has_different_experts_and_all_are_counted(model: str, tokens: int) -> None:
    workload = parse_workload(f"{model}:decode:{tokens}")
    assert all(len(set(experts)) == workload.top_k for experts in workload.top_k_index)
    assert len(workload.group_sizes) == workload.experts
    assert sum(workload.group_sizes) == workload.rows == tokens * workload.top_k
    # The draw is the same in another process and another day.
    assert parse_workload(workload.name).group_sizes == workload.group_sizes


def test_a_chips_part() -> None:
    whole, tensor, expert = (
        parse_workload(f"qwen3-30b-a3b:prefill:512{part}") for part in ("", ":tp8", ":ep8")
    )
    assert (whole.intermediate, whole.local_experts) == (768, 128)
    assert (tensor.intermediate, tensor.local_experts) == (96, 128)
    assert (expert.intermediate, expert.local_experts) == (768, 16)
    assert expert.group_sizes == whole.group_sizes


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3-30b-a3b", "is no case; give <model>:<phase>:<tokens>"),
        ("qwen:decode:8", "no model 'qwen'.*qwen3-30b-a3b"),
        ("qwen3-30b-a3b:chat:8", "no phase 'chat'.*decode, prefill, train"),
        ("qwen3-30b-a3b:decode:8:tp7", "768, cannot be split evenly over 7"),
        ("llama-4-scout:decode:8:tp16", "its 40 heads cannot be split evenly over 16"),
        ("mixtral-8x7b:decode:8:ep16", "8, cannot be split evenly over 16"),
        ("mixtral-8x7b:decode:0", "it has no tokens"),
    ],
)
def test_impossible_cases_are_refused(name: str, message: str) -> None:
    with pytest.raises(AnalysisError, match=message):
        parse_workload(name)


def test_a_chips_heads() -> None:
    [whole] = parse_workload("qwen3-30b-a3b:decode:8").attention
    [tensor] = parse_workload("qwen3-30b-a3b:decode:8:tp8").attention
    [expert] = parse_workload("qwen3-30b-a3b:decode:8:ep8").attention
    assert (whole.heads, whole.kv_heads) == (expert.heads, expert.kv_heads) == (32, 4)
    assert (tensor.heads, tensor.kv_heads) == (4, 1)


def test_attention_has_a_call_for_each_kind_of_layer() -> None:
    kernel = get_kernel("tpu-kernels/attention", version=1)
    [full, sliding] = kernel_cases(kernel, parse_workload("gpt-oss-20b:decode:8"), tpu="v6e")
    assert (full.op, sliding.name) == ("decode_attention", "gpt-oss-20b:decode:8 sliding")
    assert sliding.job.static["window"] == 128
    assert sliding.job.data["lengths"].tolist() == [4096] * 8
    [training] = kernel_cases(kernel, parse_workload("mixtral-8x7b:train:1024"), tpu="v6e")
    assert training.op == "flash_attention"


def test_a_kernel_tells_its_calls(kernel: ModuleType) -> None:
    cases = kernel_cases(kernel, parse_workload("qwen3-30b-a3b:decode:8"), tpu="v5e")
    assert [case.name for case in cases] == [
        "qwen3-30b-a3b:decode:8 gate-up",
        "qwen3-30b-a3b:decode:8 down",
    ]
    job = cases[0].job
    assert (job.tpu, job.static["lhs"].shape, job.static["rhs"].shape) == (
        "v5e",
        (64, 2048),
        (128, 1536, 2048),
    )
    assert int(job.data["group_sizes"].sum()) == 64
    [layer] = kernel_cases(kernel, parse_workload("qwen3-30b-a3b:decode:8"), tpu="v5e", op="experts")
    assert layer.job.data["top_k_index"].shape == (8, 8)
    with pytest.raises(AnalysisError, match=r"'spam' has no call .* ops that have: experts, ragged_dot"):
        kernel_cases(kernel, parse_workload("qwen3-30b-a3b:decode:8"), tpu="v5e", op="spam")
    with pytest.raises(AnalysisError, match="declares no cases"):
        kernel_cases(SimpleNamespace(__name__="plain"), parse_workload("qwen3-30b-a3b:decode:8"), tpu="v5e")


def test_a_kernel_may_name_cases_of_its_own() -> None:
    call = SimpleNamespace(op="double", part="small", arguments={"x": ((8, 128), "float32")}, static={})
    kernel = SimpleNamespace(
        __name__="own",
        double=None,
        cases=SimpleNamespace(benchmarks=lambda: [call], calls=lambda workload: []),
    )
    [case] = find_cases(kernel, "small", tpu="v5e")
    assert (case.op, case.job.tpu, case.job.static["x"].shape) == ("double", "v5e", (8, 128))
    with pytest.raises(AnalysisError, match=r"'large' is no case.*; the kernel's own cases are small"):
        find_cases(kernel, "large", tpu="v5e")


def test_training_has_the_gradient(kernel: ModuleType) -> None:
    import jax

    [gate_up, _] = kernel_cases(kernel, parse_workload("mixtral-8x7b:train:64"), tpu="v6e")
    assert gate_up.job.fn.__name__ == "ragged_dot_training"
    with parse_target("v6e").mesh():
        result, gradients = jax.eval_shape(gate_up.job.fn, *gate_up.job.args)
    assert result.shape == (128, 28672)
    assert {name: leaf.shape for name, leaf in gradients.items()} == {
        "lhs": (128, 4096),
        "rhs": (8, 28672, 4096),
    }
