"""Golden vectors: made once, run on a device."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import tpu_kernels
from tpu_kernels.authoring import build, init, write_golden
from tpu_kernels.authoring.examples import declared
from tpu_kernels.authoring.golden import run_golden
from tpu_kernels.cli import app

from .conftest import KERNELS


def test_a_device_that_computes_something_else_fails(tmp_path: Path) -> None:
    source = init("acme/fast-gate", folder=tmp_path / "fast-gate")
    vectors = write_golden(source)
    before = vectors.read_bytes()
    assert write_golden(source).read_bytes() == before

    # What the CPU computes is the reference.
    reference = source / "torch-ext/fast_gate/reference.py"
    reference.write_text(reference.read_text().replace("jax.nn.silu", "jax.nn.gelu"))
    build(source, tmp_path / "dist")
    result = CliRunner().invoke(app, ["selftest", str(tmp_path / "dist"), "--device", "cpu"])
    assert result.exit_code == 1
    assert result.output.count("FAIL") == 3
    assert "swiglu rows: has a relative error of" in result.output
    assert vectors.read_bytes() == before


def test_what_has_no_vectors_or_no_such_device_says_so(tmp_path: Path) -> None:
    source = init("acme/fast-gate", folder=tmp_path / "fast-gate")
    (source / "torch-ext/fast_gate/cases.py").write_text(
        '"""None."""\n\n\ndef benchmarks():\n    return []\n'
    )
    for command in (["golden", str(source)], ["selftest", str(tmp_path)]):
        assert CliRunner().invoke(app, command).exit_code != 0
    build(source, tmp_path / "dist")
    result = CliRunner().invoke(app, ["selftest", str(tmp_path / "dist")])
    assert "brings no golden vectors" in str(result.exception)


@pytest.mark.parametrize("name", KERNELS)
def test_every_shipped_kernel_brings_its_examples_and_passes(name: str, device: str) -> None:
    kernel = tpu_kernels.get_kernel(f"tpu-kernels/{name}", version=1)
    vectors = list(run_golden(kernel, device))
    assert [vector.name for vector in vectors] == sorted(example.name for example in declared(kernel))
    assert not [(vector.name, vector.failure, vector.difference) for vector in vectors if not vector.passed]
