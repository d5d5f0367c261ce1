"""A build to take elsewhere: its files, verified, in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import VerificationError
from ..explanation import ResolvedBuild
from ..layout import list_files
from ..metadata import Metadata
from ..verify import verify


@dataclass(frozen=True, eq=False)
class Artifact:
    """A build: its metadata and the content of every file of its variant folder, by relative path."""

    metadata: Metadata
    files: Mapping[str, bytes]

    @property
    def size(self) -> int:
        """Bytes, of all files."""
        return sum(map(len, self.files.values()))


def fetch_artifact(build: ResolvedBuild) -> Artifact:
    """Fetches the files of `build` and verifies them.

    Raises:
        VerificationError: A file is missing, changed, not listed, or no regular file.
        SourceUnavailableError: The files are not here and cannot be fetched.
    """
    files = build.fetch()
    verify(replace(build, fetch=lambda: files))
    try:
        listed = list_files(files.path, VerificationError, links_into=files.links_into)
        contents = {path: file.read_bytes() for path, file in listed.items()}
    except OSError as error:
        raise VerificationError(f"the kernel in {files.path} cannot be read: {error}") from error
    # Again, where nobody else writes: what is taken elsewhere are these bytes, not those on disk.
    with tempfile.TemporaryDirectory(prefix="tpu-kernels-") as folder:
        for path, content in contents.items():
            copy = Path(folder, path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)
        verify(replace(build, fetch=lambda: replace(files, path=Path(folder), links_into=None)))
    return Artifact(build.metadata, contents)
