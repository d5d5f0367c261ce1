from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from tpu_kernels import get_kernel
from tpu_kernels.cli import app
from tpu_kernels.ops.tables import user_file

from ..analysis.conftest import needs_libtpu

CASE = ["--case", "qwen3-30b-a3b:decode:1:ep8", "--limit", "2", "--workers", "1"]


def run(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, ["tune", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@needs_libtpu
def test_tunes_a_loaded_kernel_for_its_user_and_a_source_for_all(source: Path) -> None:
    text = run("ragged-dot", *CASE)
    table = user_file(get_kernel("tpu-kernels/ragged-dot", version=1).__name__, "v6e")
    assert "simulated, not measured" in text
    assert "faster than the heuristic" in text
    assert f"written to {table}" in text
    assert [entry["candidates"] for entry in json.loads(table.read_text())] == [2, 2]

    found = json.loads(run(source, *CASE, "--json"))
    assert [each["cases"][0].rpartition(" ")[2] for each in found] == ["gate-up", "down"]
    assert all(each["gain"] >= 0 and each["evidence"] == "simulated" for each in found)
    written = source / "torch-ext" / "ragged_dot" / "tuned" / "v6e.json"
    assert len(json.loads(written.read_text())) == 2
