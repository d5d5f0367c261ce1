"""Files a benchmark leaves: whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import BenchmarkError
from ..files import replace_file


def check_writable(path: Path) -> None:
    """Refuses, before hours of measuring, a path that could not be written after them."""
    if path.is_dir():
        raise BenchmarkError(f"cannot write {path}: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise BenchmarkError(
            f"cannot write {path}: there is no folder {path.parent}; make it, or name another"
        )
    # The file is replaced, so it is the folder that has to allow it; but a file that was made read-only was
    # meant to stay.
    blocked = next((at for at in (path.parent, path) if at.exists() and not os.access(at, os.W_OK)), None)
    if blocked is not None:
        raise BenchmarkError(
            f"cannot write {path}: no permission for {blocked}; change it, or name another path"
        )


def write_result(path: Path, content: bytes) -> None:
    """Writes `content` to `path` in one step: a reader sees the old file or the new one, never a part."""
    check_writable(path)
    try:
        replace_file(path, content)
    except OSError as error:
        raise BenchmarkError(f"cannot write {path}: {error}") from error
