"""Fresh interpreters, since the device of a process is settled when it first imports torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_python(tmp_path: Path) -> Run:
    """Runs python with arguments in an empty folder, and fails if it hangs."""

    def run(*arguments: str, timeout: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TPU_KERNELS_")}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=inherited | variables,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run
