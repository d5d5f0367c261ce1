"""`tpu-kernels build`."""

from __future__ import annotations

from pathlib import Path

import typer
from typer.testing import CliRunner

from tpu_kernels.cli.build import build

app = typer.Typer()
app.command()(build)


def test_it_builds_a_kernel(source: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [str(source), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("tpu-kernels/sample-kernel v1: _sample_kernel_tpu_")
    assert (tmp_path / "out" / "build" / "torch-tpu" / "metadata.json").is_file()


def test_it_builds_a_registry(source: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [str(source.parent), "--registry", str(tmp_path / "registry")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "registry" / "index.json").is_file()


def test_it_wants_one_place_to_write_to(source: Path, tmp_path: Path) -> None:
    for options in ([], ["--out", str(tmp_path / "out"), "--registry", str(tmp_path / "registry")]):
        assert CliRunner().invoke(app, [str(source), *options]).exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["kernels"]
