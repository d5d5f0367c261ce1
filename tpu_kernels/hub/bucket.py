"""A registry in a bucket, or anywhere else that fsspec reaches: `gs://`, `s3://`, `memory://` and the like.

Builds are kept on this machine under a name that stands for all of their files: the SHA-256 of what the index
lists of them, or where it lists none, of their `metadata.json`, which lists the digests of all other files. So
a build that is here is the right one wherever it came from, and is never fetched again. The index is kept too,
for when the bucket cannot be reached.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import KernelNotFoundError, SourceUnavailableError, VerificationError
from ..files import replace_file
from ..log import get_logger, warn_once
from . import usage
from .explanation import ResolvedBuild
from .layout import (
    CARD_FILE,
    LARGEST_DOCUMENT,
    METADATA_FILE,
    VARIANT,
    excessive,
    listing_digest,
    read_document,
)
from .metadata import Index, Metadata, parse_json
from .sources import INDEX_FILE, Candidate, Files, IndexedSource, read_metadata_file
from .storage import Storage
from .verify import verify


def builds_folder() -> Path:
    """Where builds from buckets are kept."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "tpu-kernels" / "builds"


def build_lock(name: str) -> Path:
    """The lock of a kept build."""
    return builds_folder().with_name("locks") / f"{name}.lock"


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
            content = self._storage.read(INDEX_FILE, limit=LARGEST_DOCUMENT)
        except SourceUnavailableError as error:
            content = self._kept_index()
            if content is None:
                raise
            warn_once(f"{error}; the index is the one that was read last")
        if content is None:
            raise KernelNotFoundError(
                f"{self.url} is no registry of kernels: there is no {INDEX_FILE} in it; make one with: "
                f"tpu-kernels mirror ORG/NAME --to {self.url}"
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
        fetched = self._storage.read(path, limit=LARGEST_DOCUMENT)
        if fetched is None:
            raise VerificationError(f"{candidate.address} has no {METADATA_FILE}, which the index promises")
        return self.check_metadata(candidate, fetched, "copy the registry again")

    def files(self, candidate: Candidate, metadata: Metadata) -> Files:
        folder = self._kept(candidate)
        usage.hold(build_lock(folder.name))
        if not folder.is_dir():
            self._download(candidate, metadata, folder)
        return self._files(candidate, folder)

    def read_card(self, candidate: Candidate) -> bytes | None:
        return self._storage.read(f"{candidate.location}/{CARD_FILE}")

    def local_path(self, candidate: Candidate) -> Path | None:
        kept = self._kept(candidate)
        return kept if kept.is_dir() else None

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
                for number, path in enumerate(self._listed(candidate, metadata)):
                    data = self._storage.read(f"{candidate.location}/build/{VARIANT}/{path}")
                    size += len(data or b"")
                    if excess := excessive(number, size):
                        raise VerificationError(f"{candidate.address} holds {excess}; nothing of it was kept")
                    # What is missing is named by the verification, with all else that is wrong.
                    if data is not None:
                        target = work / path
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.write_bytes(data)
                verify(
                    ResolvedBuild(
                        candidate.repo_id,
                        candidate.address,
                        metadata,
                        lambda: self._files(candidate, work),
                    )
                )
                # Another process may have been faster; its build is the same one.
                with contextlib.suppress(OSError):
                    work.rename(folder)
        except OSError as error:
            raise SourceUnavailableError(f"{candidate.address} was not downloaded: {error}") from error
        if not folder.is_dir():
            raise SourceUnavailableError(
                f"{candidate.address} was downloaded but not kept: {folder} is absent"
            )

    def _files(self, candidate: Candidate, folder: Path) -> Files:
        listed = self.entry(candidate).files
        return Files(
            folder,
            digests_required=listed is None,
            git_ids=listed,
            remedy=f"to download it again, delete {folder}",
        )

    def _listed(self, candidate: Candidate, metadata: Metadata) -> Iterable[str]:
        """The files to fetch beside `metadata.json`."""
        listed = self.entry(candidate).files
        if listed is not None:
            return [path for path in listed if path != METADATA_FILE]
        return metadata.digest.files if metadata.digest else ()

    def _kept(self, candidate: Candidate) -> Path:
        listed = self.entry(candidate).files
        return builds_folder() / (listing_digest(listed) if listed else self.promised(candidate))

    @property
    def _index_file(self) -> Path:
        name = hashlib.sha256(self.url.encode()).hexdigest()
        return builds_folder().with_name("indexes") / f"{name}.json"

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
            replace_file(self._index_file, content)
        except OSError as error:
            get_logger().info("%s was not written: %s", self._index_file, error)

    @functools.cached_property
    def _storage(self) -> Storage:
        return Storage(self.url)
