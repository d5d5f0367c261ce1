"""What a dashboard is made of: the compiler, the simulator, and the reports of other commands."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tpu_kernels import dashboard
from tpu_kernels.bench.results import ArmResult, DecodeConfig, DecodeResult, Difference, Measurement, Summary
from tpu_kernels.cli import app
from tpu_kernels.errors import DashboardError

from ..analysis.conftest import needs_libtpu

CASE = "qwen3-30b-a3b:decode:8"


@needs_libtpu
def test_the_command_writes_a_page_and_its_facts(tmp_path: Path) -> None:
    rows = [
        {
            "generation": "v6e",
            "kind": "forward",
            "problem": "M8",
            "ours_ms": ours,
            "floor_ms": 1.0,
            "peer_ms": 3.0,
        }
        for ours in (2.0, None)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    check = {"kernel": "ragged-dot", "ok": True, "checks": [{"check": "numerics", "status": "passed"}]}
    (tmp_path / "check.json").write_text(json.dumps(check))
    arguments = ["dashboard", "--out", str(tmp_path / "site"), "--tpu", "v6e", "--case", CASE]
    arguments += ["--peers", f"tpu-kernels/ragged-dot={tmp_path / 'rows.json'}"]
    arguments += ["--check", str(tmp_path / "check.json")]
    for _ in range(2):  # the second time there is a history
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
    facts = dashboard.Facts.model_validate_json((tmp_path / "site" / "facts.json").read_bytes())
    kernels = {kernel.name: kernel for kernel in facts.kernels}
    product = kernels["tpu-kernels/ragged-dot"]
    assert product.checks == {"numerics": "passed"}
    assert {run.generation for run in product.runs} == {"v6e"}
    for run in product.runs:
        assert run.compiled
        assert run.over_floor is not None
        assert 1 <= run.over_floor < 3
    assert [peer.faster for peer in facts.peers] == [1.5]
    assert {kernel.build for kernel in facts.history} == {kernel.build for kernel in facts.kernels}
    page = (tmp_path / "site" / "index.html").read_text()
    assert "tpu-kernels/ragged-dot" in page
    assert CASE in page


def test_decode_results(tmp_path: Path) -> None:
    of = Summary.of([2.0])
    measured = Measurement(1.0, of, of, of, of, 1, 0, False, "ours", None, (), ())
    arms = (
        ArmResult("ours", "a kernel", 1, measured, None),
        ArmResult("other", "XLA", 1, dataclasses.replace(measured, difference=Difference(0, 3)), None),
        ArmResult("third", "XLA", 1, None, "it has no experts"),
    )
    result = DecodeResult(DecodeConfig("preset:mixtral"), "emulated", "a CPU", "words", {}, "now", arms)
    path = tmp_path / "decode.json"
    path.write_text(result.to_json())
    models = dashboard.read_decode(path)
    assert [model.tokens for model in models] == ["reference", "differ", "not run"]
    assert models[2].note == "it has no experts"
    assert {model.evidence for model in models} == {"emulated"}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"arms": [{}]}'])
def test_a_file_that_is_something_else(content: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(DashboardError, match=r"other\.json"):
        dashboard.read_decode(path)
    with pytest.raises(DashboardError, match=r"other\.json"):
        dashboard.read_checks(path)
