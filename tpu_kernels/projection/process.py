"""Runs the worker, in a process that may emulate a device whatever this one has imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ..errors import ProjectionError
from .records import Answer, Request

_PACKAGE_PARENT = Path(__file__).parents[2]
_LONGEST = 2000  # characters of what a process that failed said last


def export_in_process(request: Request, folder: Path) -> Answer:
    """What the worker exports to `folder` for a request.

    Raises:
        ProjectionError: The model cannot be exported.
    """
    (folder / "request.json").write_text(request.model_dump_json(), encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(_PACKAGE_PARENT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        # -P: a module in the working directory must not stand in for one of the standard library.
        [sys.executable, "-P", "-m", f"{__package__}.worker", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )
    result = folder / "answer.json"
    if done.returncode or not result.exists():
        last = next((line.strip() for line in reversed(done.stderr.splitlines()) if line.strip()), "")
        raise ProjectionError(f"the model's layers cannot be exported: {last[:_LONGEST] or 'no word why'}")
    answer = Answer.model_validate_json(result.read_text(encoding="utf-8"))
    if answer.error is not None:
        raise ProjectionError(answer.error)
    return answer
