"""`tpu-kernels explain`, as text and as data."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

import tpu_kernels
from tpu_kernels.cli.explain import explain

from .conftest import REPO, MakeSource, Serve, UseRegistry

runner = CliRunner()


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(explain)
    return app


def test_the_trace_is_printed(app: typer.Typer, make_source: MakeSource, use_registry: UseRegistry) -> None:
    use_registry(make_source())
    result = runner.invoke(app, [REPO, "--version", "1"])
    assert (result.exit_code, result.output) == (0, f"{tpu_kernels.explain(REPO, version=1)}\n")


def test_a_no_has_an_exit_status_and_is_data_too(
    app: typer.Typer, make_source: MakeSource, serve: Serve
) -> None:
    serve(make_source(), trusted=[])
    result = runner.invoke(app, [REPO, "--json"])
    assert result.exit_code == 1
    data = json.loads(result.output)
    assert data["reference"] == {"repo-id": REPO, "version": None, "revision": None}
    assert [step["source"] for step in data["decisions"]] == ["hub"]
    assert (data["build"], data["error"]["kind"]) == (None, "UntrustedKernelError")
    trusting = json.loads(runner.invoke(app, [REPO, "--json", "--trust", "tpu-kernels"]).output)
    assert (trusting["build"]["repo-id"], trusting["build"]["version"]) == (REPO, 1)
    assert trusting["error"] is None
