import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tpu_kernels
from tpu_kernels import cli
from tpu_kernels.bench import decode as decode_module

DECODE = ["bench", "decode", "--model", "preset:mixtral", "--device", "cpu", "--prompt-length", "8"]


def invoke(*arguments: str) -> str:
    outcome = CliRunner().invoke(cli.app, arguments)
    assert outcome.exit_code == 0, outcome.output
    return outcome.stdout


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["tpu-kernels", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return exit_.value.code


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['tpu-kernels', '--help']\n"
        "from tpu_kernels.cli import main\n"
        "try: main()\n"
        "except SystemExit as exit_: assert not exit_.code\n"
        "assert not {'torch', 'jax', 'transformers', 'matplotlib'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in ("bench", "build", "compile", "emulate", "explain"):
        assert command in done.stdout


def test_version() -> None:
    assert invoke("--version") == f"tpu-kernels {tpu_kernels.__version__}\n"


def test_decode_prints_and_writes(tmp_path: Path) -> None:
    report, picture = tmp_path / "result.json", tmp_path / "result.png"
    shown = invoke(
        *DECODE,
        *("--experts", "stock, eager", "--batch", "1,2", "--new-tokens", "3", "--repeats", "1"),
        *("--json", str(report), "--plot", str(picture)),
    )
    assert "Decode of preset:mixtral: CPU" in shown
    assert "not TPU speeds" in shown
    document = json.loads(report.read_text())
    assert [(arm["experts"], arm["batch"]) for arm in document["arms"]] == [
        ("stock", 1),
        ("stock", 2),
        ("eager", 1),
        ("eager", 2),
    ]
    assert all(arm["measurement"]["difference"] is None for arm in document["arms"])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(find_spec("lammps_jax_pjrt_cpu") is None, reason="needs the emulation extra")
def test_decode_on_the_emulated_device(tmp_path: Path) -> None:
    # In a process of its own: this one has imported torch.
    report = tmp_path / "result.json"
    command = [
        sys.executable,
        "-c",
        "from tpu_kernels.cli import main; main()",
        *DECODE,
        "--device",
        "emulated",
    ]
    command += ["--experts", "tpu_ragged_dot,stock", "--batch", "2", "--new-tokens", "4", "--repeats", "1"]
    command += ["--json", str(report)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert "emulated TPU, on the CPU – not TPU speeds" in done.stdout
    document = json.loads(report.read_text())
    assert document["evidence"] == "emulated"
    assert "not TPU speeds" in document["caution"]
    assert [arm["runs_as"] for arm in document["arms"]] == [
        "tpu_ragged_dot (fused; ops interpreted)",
        "grouped_mm, batched_mm while decoding",
    ]
    for arm in document["arms"]:
        measurement = arm["measurement"]
        assert measurement["reference"] == "stock"
        assert measurement["difference"] is None
        assert (measurement["graphs"], measurement["late_graphs"]) == (1, 0)
        assert not measurement["recompile_limit_hit"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "1,x"], "batch 'x' is not a whole number; give numbers, as in 1,8,64"),
        (["--batch", "0"], "batch is 0; it must be at least 1"),
        (["--batch", ","], "batch is empty; give at least one"),
        (["--json", "/"], "cannot write /: it is a folder; name a file in it"),
        (["--plot", "/nowhere/plot.png"], "cannot write /nowhere/plot.png: there is no folder /nowhere"),
    ],
)
def test_an_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(monkeypatch, *DECODE, *arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"error: {message}")
    assert output.err.count("\n") == 1


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(decode_module, "_check_values", broken)
    monkeypatch.setattr(sys, "argv", ["tpu-kernels", *DECODE])
    with pytest.raises(ZeroDivisionError):
        cli.main()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_spec("lammps_jax_pjrt_cpu") is None, reason="needs the emulation extra")
@pytest.mark.parametrize("family", ["gpt-oss", "gemma4"])
def test_sliding_windows_are_compiled_by_our_loop_only(family: str, tmp_path: Path) -> None:
    """transformers' static cache is another graph in each step, until torch gives up and runs it op by op."""
    report = tmp_path / "result.json"
    command = [sys.executable, "-c", "from tpu_kernels.cli import main; main()", "bench", "decode"]
    command += ["--model", f"preset:{family}", "--device", "emulated", "--experts", "stock,stock+loop"]
    command += ["--batch", "1", "--prompt-length", "30", "--new-tokens", "16", "--repeats", "1"]
    subprocess.run([*command, "--json", str(report)], timeout=1700, check=True)
    stock, ours = (arm["measurement"] for arm in json.loads(report.read_text())["arms"])
    assert stock["recompile_limit_hit"]
    assert stock["graphs"] >= 8
    assert not ours["recompile_limit_hit"]
    assert (ours["graphs"], ours["late_graphs"]) == (2, 0)
    assert ours["difference"] is None
