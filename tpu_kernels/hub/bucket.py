"""A registry in a bucket, or anywhere else that fsspec reaches: `gs://`, `s3://`, `memory://` and the like.

Builds are kept on this machine under the SHA-256 of their `metadata.json`, which the index promises and
which lists the digests of all other files. So a build that is here is the right one wherever it came from,
and is never fetched again. The index is kept too, for when the bucket cannot be reached.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import KernelNotFoundError, SourceUnavailableError, VerificationError
from ..log import get_logger, warn_once
from .layout import (
    LARGEST_DOCUMENT,
    METADATA_FILE,
    VARIANT,
    excessive,
    read_document,
    replace_file,
)
from .metadata import Index, Metadata, parse_json
from .sources import INDEX_FILE, Candidate, Files, IndexedSource, read_metadata_file
from .verify import verify_files


@dataclass(frozen=True)
class BucketSource(IndexedSource):
    """The registry at `url`. Its kernels are trusted: the user named it."""

    url: str

    @property
    def name(self) -> str:
        return self.url

    @functools.cached_property
    def index(self) -> Index:
        try:
            content = self._read(INDEX_FILE, limit=LARGEST_DOCUMENT)
        except SourceUnavailableError as error:
            content = self._kept_index()
            if content is None:
                raise
            warn_once(f"{error}; the index is the one that was read last")
        if content is None:
            raise KernelNotFoundError(
                f"{self.url} is no registry of kernels: there is no {INDEX_FILE} in it; make one with: "
                "tpu-kernels build SOURCES --registry DIR, and copy it there"
            )
        index = parse_json(Index, content, f"{self.url}/{INDEX_FILE}")
        self._keep_index(content)
        return index

    def address(self, location: str) -> str:
        return f"{self.url.rstrip('/')}/{location}/build/{VARIANT}"

    def read_metadata(self, candidate: Candidate) -> bytes:
        kept = self._kept(candidate)
        if kept.is_dir():
            content = read_metadata_file(kept)
            return self.check_metadata(candidate, content, f"to download it again, delete {kept}")
        path = f"{candidate.location}/build/{VARIANT}/{METADATA_FILE}"
        fetched = self._read(path, limit=LARGEST_DOCUMENT)
        if fetched is None:
            raise VerificationError(f"{candidate.address} has no {METADATA_FILE}, which the index promises")
        return self.check_metadata(candidate, fetched, "copy the registry again")

    def files(self, candidate: Candidate, metadata: Metadata) -> Files:
        folder = self._kept(candidate)
        if not folder.is_dir():
            self._download(candidate, metadata, folder)
        return Files(folder, remedy=f"to download it again, delete {folder}")

    def _download(self, candidate: Candidate, metadata: Metadata, folder: Path) -> None:
        """Puts a build in `folder`: whole, verified, and all at once."""
        content = self.read_metadata(candidate)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".download-") as temporary:
                work = Path(temporary) / folder.name
                work.mkdir()
                (work / METADATA_FILE).write_bytes(content)
                size = 0
                for number, path in enumerate(metadata.digest.files if metadata.digest else ()):
                    data = self._read(f"{candidate.location}/build/{VARIANT}/{path}")
                    size += len(data or b"")
                    if excess := excessive(number, size):
                        raise VerificationError(f"{candidate.address} holds {excess}; nothing of it was kept")
                    # What is missing is named by the verification, with all else that is wrong.
                    if data is not None:
                        target = work / path
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.write_bytes(data)
                verify_files(work, metadata)
                # Another process may have been faster; its build is the same one.
                with contextlib.suppress(OSError):
                    work.rename(folder)
        except OSError as error:
            raise SourceUnavailableError(f"{candidate.address} was not downloaded: {error}") from error
        if not folder.is_dir():
            raise SourceUnavailableError(
                f"{candidate.address} was downloaded but not kept: {folder} is absent"
            )

    def _kept(self, candidate: Candidate) -> Path:
        return _kept_folder() / "builds" / self.promised(candidate)

    @property
    def _index_file(self) -> Path:
        return _kept_folder() / "indexes" / f"{hashlib.sha256(self.url.encode()).hexdigest()}.json"

    def _kept_index(self) -> bytes | None:
        try:
            return read_document(self._index_file)
        except OSError:
            return None

    def _keep_index(self, content: bytes) -> None:
        """Keeps the index for when the bucket cannot be reached; what is in it is checked as ever."""
        if content == self._kept_index():
            return
        try:
            self._index_file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._index_file, content)
        except OSError as error:
            get_logger().info("%s was not written: %s", self._index_file, error)

    @functools.cached_property
    def _file_system(self) -> tuple[Any, str]:
        import fsspec  # type: ignore[import-untyped]

        try:
            file_system, root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise SourceUnavailableError(f"{self.url} cannot be read: {error}") from error
        return file_system, str(root).rstrip("/")

    def _read(self, path: str, *, limit: int | None = None) -> bytes | None:
        """A file of the bucket, cut off just past `limit` bytes; None where there is none."""
        file_system, root = self._file_system
        # Object stores refuse to give a part of an empty file, so only documents are asked for in part.
        part = {} if limit is None else {"start": 0, "end": limit + 1}
        try:
            return bytes(file_system.cat_file(f"{root}/{path}", **part))
        except FileNotFoundError:
            return None
        except Exception as error:  # each file system raises errors of its own
            raise SourceUnavailableError(
                f"{self.url}/{path} cannot be read: {type(error).__name__}: {error}"
            ) from error


def _kept_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "tpu-kernels"
