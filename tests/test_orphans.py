"""Work ends with the process that asked for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

CHILD = (
    "import sys, time; from tpu_kernels.orphans import die_with; "
    "die_with({}); print('up', flush=True); time.sleep(60)"
)
PARENT = f"""
import os, subprocess, sys
child = {CHILD!r}.format(os.getpid())
subprocess.run([sys.executable, "-c", child])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a no-op elsewhere")
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_worker_ends_with_its_parent(end: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    os.kill(parent.pid, end)
    parent.wait()
    # The child holds the other end of the pipe: it closes when the child is gone.
    assert parent.stdout.read() == b""


def test_a_worker_that_starts_too_late_does_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(-1)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "process -1, which this one worked for, is gone" in done.stderr
