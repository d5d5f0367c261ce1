"""Runs the worker: one process a compile, so that a crash or a hang of the compiler costs that compile only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from .export import Program
from .failure import Failure
from .outcome import Outcome
from .target import CompileTarget

_PACKAGE_PARENT = Path(__file__).parents[2]
# Characters of a crashed compiler's output.
_TAIL, _LINE = 4000, 200


def compile_in_process(program: Program, target: CompileTarget, timeout: float) -> Outcome | Failure:
    """Compiles `program` in a new process; what the compiler did, or that it crashed or took over `timeout` s."""
    with tempfile.TemporaryDirectory(prefix="tpu-kernels-compile-") as folder:
        module, result = Path(folder, "program"), Path(folder, "outcome.json")
        module.write_bytes(program.module)
        # -P: a module in the working directory must not stand in for one of the standard library.
        command = [sys.executable, "-P", "-m", f"{__package__}.worker"]
        command += [str(module), target.topology, str(program.devices), str(result), str(os.getpid())]
        command += ["--every-schedule"] if program.every_schedule else []
        path = os.pathsep.join(filter(None, [str(_PACKAGE_PARENT), os.environ.get("PYTHONPATH")]))
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
                env=os.environ | {"PYTHONPATH": path},
            )
        except subprocess.TimeoutExpired as error:
            said = (
                error.stderr
                if isinstance(error.stderr, str)
                else (error.stderr or b"").decode(errors="replace")
            )
            return Failure("timeout", f"the compiler did not finish within {timeout:g} s", said[-_TAIL:])
        if done.returncode or not result.exists():
            return Failure("crash", f"the compiler crashed: {_end(done)}", done.stderr[-_TAIL:])
        return Outcome.from_json(result.read_text())


def _end(done: subprocess.CompletedProcess[str]) -> str:
    """How the process ended, and the last it said."""
    status = done.returncode
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
    return f"{how}: {last.strip()[:_LINE]}" if last else how
