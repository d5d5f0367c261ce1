"""Running programs on the emulated device from the command line."""

from __future__ import annotations

from pathlib import Path

from .conftest import Run

# The command as its application registers it.
COMMAND = """
import typer
from tpu_kernels.cli.emulate import CONTEXT_SETTINGS, emulate

app = typer.Typer()
app.command(context_settings=CONTEXT_SETTINGS)(emulate)
app()
"""

PROGRAM = """
import sys
import neighbour
from tpu_kernels import emulation

print(emulation.is_active(), __name__, sys.argv)
sys.exit(7)
"""


def test_command_runs_a_script(run_python: Run, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.joinpath("neighbour.py").touch()
    folder.joinpath("script.py").write_text(PROGRAM)
    result = run_python("-c", COMMAND, "folder/script.py", "--help", "-m", "1")
    assert result.stdout == "True __main__ ['folder/script.py', '--help', '-m', '1']\n"
    assert (result.returncode, result.stderr) == (7, "")


def test_module_runs_a_module(run_python: Run, tmp_path: Path) -> None:
    tmp_path.joinpath("neighbour.py").touch()
    tmp_path.joinpath("program.py").write_text(PROGRAM)
    result = run_python("-m", "tpu_kernels.emulation", "-m", "program", "--help")
    assert result.stdout == f"True __main__ ['{tmp_path / 'program.py'}', '--help']\n"
    assert (result.returncode, result.stderr) == (7, "")


def test_names_a_script_that_is_not_there(run_python: Run) -> None:
    result = run_python("-m", "tpu_kernels.emulation", "absent.py")
    assert result.returncode == 2
    assert "there is no file absent.py" in result.stderr


def test_says_in_one_line_why_it_cannot(run_python: Run, tmp_path: Path) -> None:
    tmp_path.joinpath("script.py").touch()
    tmp_path.joinpath("lammps_jax_pjrt_cpu.py").write_text("raise ModuleNotFoundError")
    result = run_python("-m", "tpu_kernels.emulation", "script.py")
    assert result.returncode == 1
    assert result.stderr.startswith("tpu-kernels emulate: The emulated TPU needs an XLA:CPU plugin")
    assert result.stderr.count("\n") == 1
