"""Writing a folder all at once: it holds the new files, or what it held before."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from ..errors import BuildError


def replace_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Makes `folder` hold exactly `files`, given by relative path.

    They are written beside it and moved into place, so that a failure leaves `folder` as it was.

    Raises:
        BuildError: They cannot be written.
    """
    folder = folder.resolve()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as staging:
            fresh, former = Path(staging, "fresh"), Path(staging, "former")
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
    except OSError as error:
        raise BuildError(f"{folder} cannot be written: {error}") from error
