"""What simulated times depend on beside the compiler: the simulator itself."""

from __future__ import annotations

import functools
import hashlib
from importlib import resources
from importlib.resources.abc import Traversable


@functools.cache
def simulator_fingerprint() -> str:
    """A hash of the code of the analysis and of its calibrations."""
    found = hashlib.sha256()
    for file in _files(resources.files(__package__.rpartition(".")[0])):
        found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def _files(folder: Traversable) -> list[Traversable]:
    files: list[Traversable] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            files += _files(entry)
        elif entry.name.endswith((".py", ".json")):
            files.append(entry)
    return files
