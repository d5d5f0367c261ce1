from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tpu_kernels.analysis import compiler
from tpu_kernels.analysis.workload import parse_workload
from tpu_kernels.cli import app
from tpu_kernels.errors import AnalysisError

from ..conftest import needs_libtpu

CASE = ["--case", "qwen3-30b-a3b:decode:8"]


def run(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, ["simulate", "ragged-dot", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@needs_libtpu
def test_simulates_a_models_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = run(*CASE, "--plot", tmp_path / "roofline.png")
    assert "ragged_dot qwen3-30b-a3b:decode:8 gate-up on v6e, simulated: " in text
    assert "ragged_dot qwen3-30b-a3b:decode:8 down on v6e, simulated: " in text
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")

    def never(*_: object, **__: object) -> None:
        raise AssertionError("what is known is not computed again")

    # The second time nothing is compiled, traced or loaded.
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "compile_many", never)
        patch.setattr("tpu_kernels.cli.cases.get_kernel", never)
        gate_up, down = json.loads(run(*CASE, "--json"))
        assert gate_up["function"].endswith("gate-up")
        assert gate_up["evidence"] == down["evidence"] == "simulated"
        assert run(*CASE) == text
    with pytest.raises(AnalysisError, match="--trace is of one call, and there are 2"):
        run(*CASE, "--trace", tmp_path / "trace.json")


@needs_libtpu
def test_writes_the_timeline_of_a_layer(tmp_path: Path) -> None:
    text = run(*CASE, "--op", "experts", "--trace", tmp_path / "trace.json")
    assert "beside" in text
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@needs_libtpu
@pytest.mark.parametrize("case", ["qwen3-30b-a3b:decode:8:ep8", "gpt-oss-120b:decode:2:ep8"])
def test_a_layer_in_one_call_reads_the_experts_that_have_tokens(case: str) -> None:
    workload = parse_workload(case)
    command = ["simulate", "moe-experts", "--case", case, "--json"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    [profile] = json.loads(done.stdout)
    read = {part["operand"]: part["read_bytes"] for part in profile["traffic"]}
    # (Rows of 2880 are padded to whole registers.)
    active = sum(size > 0 for size in workload.group_sizes[: workload.local_experts])
    an_expert = workload.hidden * workload.intermediate * 2
    assert read["down_proj"] == pytest.approx(active * an_expert, rel=0.03)
    assert read["gate_up_proj"] == pytest.approx(2 * active * an_expert, rel=0.03)
    assert profile["xla_ops"] == []


@needs_libtpu
def test_compiles_cases() -> None:
    done = CliRunner().invoke(app, ["compile", "ragged-dot", *CASE], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "ragged_dot qwen3-30b-a3b:decode:8 down for v6e: compiled" in done.stdout
    both = CliRunner().invoke(app, ["compile", "ragged-dot", *CASE, "--arg", "int32[8]"])
    neither = CliRunner().invoke(app, ["compile", "ragged-dot"])
    assert (both.exit_code, neither.exit_code) == (2, 2)
