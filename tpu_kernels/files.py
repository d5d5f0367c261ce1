"""Writing files and folders all at once: they hold the new content, or what they held before."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .errors import TpuKernelsError


def replace_file(path: Path, content: bytes) -> None:
    """Makes the file `path` hold `content`, in one step; folders on the way to it are made.

    Raises:
        OSError: It cannot be written; what it held is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def replace_folder(folder: Path, files: Mapping[str, bytes], error: type[TpuKernelsError]) -> None:
    """Makes `folder` hold exactly `files`, given by relative path.

    They are written beside it and moved into place, so that a failure leaves `folder` as it was. Raises
    `error` where they cannot be written.
    """
    folder = folder.resolve()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as staging:
            fresh, former = Path(staging, "fresh"), Path(staging, "former")
            fresh.mkdir()
            for relative, content in files.items():
                path = fresh / relative
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            if folder.exists():
                folder.rename(former)
            try:
                fresh.rename(folder)
            except OSError:
                if former.exists():
                    former.rename(folder)
                raise
    except OSError as failure:
        raise error(f"{folder} cannot be written: {failure}") from failure
