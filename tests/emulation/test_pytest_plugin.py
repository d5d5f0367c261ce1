"""`TPU_KERNELS_EMULATE=1 pytest`."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Run


def test_runs_tests_on_the_emulated_device(run_python: Run, tmp_path: Path) -> None:
    tmp_path.joinpath("conftest.py").write_text("import torch")
    tmp_path.joinpath("test_it.py").write_text(
        "import torch\ndef test_it(): assert (torch.ones(2, device='tpu') + 1).tolist() == [2, 2]"
    )
    result = run_python("-m", "pytest", "test_it.py", TPU_KERNELS_EMULATE="1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "\ntpu: emulated\n" in result.stdout


def test_is_inert_without_the_variable(run_python: Run, tmp_path: Path) -> None:
    tmp_path.joinpath("test_it.py").write_text(
        "import sys\ndef test_it(): assert not {'torch', 'jax', 'torch_tpu'} & set(sys.modules)"
    )
    result = run_python("-m", "pytest", "test_it.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "tpu: emulated" not in result.stdout


def test_says_why_it_cannot(run_python: Run, tmp_path: Path) -> None:
    tmp_path.joinpath("lammps_jax_pjrt_cpu.py").write_text("raise ModuleNotFoundError")
    result = run_python("-m", "pytest", TPU_KERNELS_EMULATE="1")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: The emulated TPU needs an XLA:CPU plugin" in result.stderr
