"""A kernel author's day: a new kernel, checked, given golden vectors, published, and used by others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tpu_kernels.authoring import check, init, templates
from tpu_kernels.cli import app

from .conftest import KERNELS, SOURCES

USE = """
import sys, torch, tpu_kernels
kernel = tpu_kernels.get_kernel("acme/fast-gate", version=1, source=sys.argv[1])
gate, up = torch.randn(2, 7, 130)
torch.testing.assert_close(kernel.swiglu(gate, up), torch.nn.functional.silu(gate) * up)
"""
USE_IN_STOCK = """
import sys, types, torch
from pathlib import Path
torch.backends.tpu = types.ModuleType("torch.backends.tpu")  # by which stock knows a TPU
import kernels
kernel = kernels.get_local_kernel(Path(sys.argv[1], "acme/fast-gate/v1"))
gate, up = torch.randn(2, 7, 130)
torch.testing.assert_close(kernel.swiglu(gate, up), torch.nn.functional.silu(gate) * up)
assert "tpu_kernels.hub" not in sys.modules
"""


def tpu_kernels(*arguments: object) -> str:
    """Runs a command, which has to succeed."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return str(result.output)


def python(script: str, *arguments: object) -> None:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    subprocess.run(command, check=True, timeout=300, env=os.environ | {"JAX_PLATFORMS": "cpu"})


def test_from_nothing_to_other_peoples_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, registry = tmp_path / "fast-gate", tmp_path / "registry"
    tpu_kernels("init", "acme/fast-gate", "--out", source)
    tpu_kernels("golden", source)
    tpu_kernels("build", source, "--out", tmp_path / "dist")
    said = tpu_kernels("publish", source, "--to", registry, "--quick", "--yes")
    assert said.startswith("acme/fast-gate v1 (_fast_gate_tpu_")
    card = (registry / "acme/fast-gate/v1/README.md").read_text()
    assert (
        "Checked without a TPU: layout, lint, declaration, numerics, gradients, memory, compile, torch"
        in card
    )
    python(USE, registry)
    if pytest.importorskip("kernels"):
        python(USE_IN_STOCK, registry)

    monkeypatch.setenv("TPU_KERNELS_CACHE", str(tmp_path / "cache"))  # where passing is remembered
    selftest = (
        "selftest",
        "acme/fast-gate",
        "--version",
        1,
        "--source",
        registry,
        "--device",
        "cpu",
        "--json",
    )
    assert json.loads(tpu_kernels(*selftest))["passed"]


def test_a_name_that_cannot_be_one_makes_nothing(tmp_path: Path) -> None:
    for name in ("Fast", "x", "class/", "acme/1st", "import-"):
        result = CliRunner().invoke(app, ["init", name, "--out", str(tmp_path / "out")])
        assert result.exit_code != 0
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    assert CliRunner().invoke(app, ["init", "fast-gate", "--out", str(tmp_path / "out")]).exit_code != 0


@pytest.mark.slow
@pytest.mark.parametrize("template", list(templates()))
def test_every_template_passes_as_it_is(template: str, tmp_path: Path) -> None:
    report = check(init("acme/new-kernel", template, tmp_path / "new-kernel"))
    assert report.ok, str(report)
    assert [outcome.check for outcome in report.outcomes if outcome.status == "not run"] == ["golden"]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernels_of_this_repository_pass(kernel: str) -> None:
    report = check(SOURCES / kernel)
    assert report.ok, str(report)
    assert not [outcome.check for outcome in report.outcomes if outcome.status == "not run"]
