"""`tpu-kernels doctor`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tpu_kernels.cli import app
from tpu_kernels.doctor import integrations
from tpu_kernels.doctor.finding import within


def test_all_of_it_as_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TPU_KERNELS_SOURCES", "registry")
    monkeypatch.setenv("TPU_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(integrations, "_probe", lambda offline: {"table": ["tpu_ragged_dot"]})
    result = CliRunner().invoke(app, ["doctor", "--offline", "--json"])
    data = json.loads(result.stdout)
    assert (result.exit_code, data["problems"]) == (0, 0)
    assert list(dict.fromkeys(finding["section"] for finding in data["findings"])) == [
        "packages",
        "machine",
        "environment",
        "sources",
        "caches",
        "integrations",
    ]
    assert set(data["findings"][0]) == {"section", "level", "subject", "message", "remedy"}


def test_a_problem_has_an_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_KERNELS_SOURCES", "nonsense")
    monkeypatch.setattr(integrations, "examine", lambda offline: iter(()))
    result = CliRunner().invoke(app, ["doctor", "--offline"])
    assert result.exit_code == 1
    assert "problem  configuration: TPU_KERNELS_SOURCES names 'nonsense'" in result.stdout
    assert "do: correct or unset it" in result.stdout


def test_it_imports_nothing_that_would_open_a_tpu() -> None:
    script = (
        "import sys\nfrom tpu_kernels.doctor import examine, integrations\n"
        "integrations._probe = lambda offline: {}\nlist(examine(offline=True))\n"
        "assert not {'torch', 'torch_tpu', 'jax', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_what_hangs_is_left_behind() -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer within"):
        within(0.05, lambda: time.sleep(30))
    assert time.monotonic() - start < 10
    with pytest.raises(ZeroDivisionError):
        within(10, lambda: 1 / 0)
