"""Sources: where kernels come from.

`resolve` asks the sources of `default_sources` in order. A new kind of source is one class with the
methods of `Source`, and its place in that list.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..errors import KernelNotFoundError, VerificationError
from .layout import METADATA_FILE, VARIANT
from .metadata import Index, parse_json
from .reference import Reference

INDEX_FILE = "index.json"

_VERSION_BRANCH = re.compile(r"v([1-9][0-9]*)")


@dataclass(frozen=True)
class Candidate:
    """A build that a source offers for a reference. Nothing of it has been read yet.

    `location` is the source's own name for the place: a folder, a commit.
    """

    repo_id: str
    version: int
    location: str


class Source(Protocol):
    """A place that kernels come from. It is hashable: what was loaded is remembered by its sources."""

    @property
    def name(self) -> str:
        """What messages and traces call it."""

    def repo_ids(self) -> list[str]:
        """The kernels it can list, for suggestions; empty where it cannot list any."""

    def versions(self, repo_id: str) -> list[int]:
        """The versions it has of a kernel, newest first; empty where it does not know the kernel."""

    def find(self, reference: Reference) -> list[Candidate]:
        """The builds that match `reference`, newest first; empty where none does."""

    def read_metadata(self, candidate: Candidate) -> bytes:
        """The `metadata.json` of a build, as the source vouches for it."""

    def fetch(self, candidate: Candidate) -> Path:
        """The variant folder of a build, on this machine."""


@dataclass(frozen=True)
class RegistrySource:
    """A folder of built kernels with an index, such as the registry that ships with this package."""

    root: Path

    @property
    def name(self) -> str:
        return "registry"

    @functools.cached_property
    def index(self) -> Index:
        """The registry's index, read once."""
        path = self.root / INDEX_FILE
        try:
            content = path.read_bytes()
        except OSError as error:
            raise KernelNotFoundError(
                f"the kernel registry cannot be read: {error}; reinstall tpu-kernels, "
                "or in a source checkout run: tpu-kernels build kernels_src --registry registry"
            ) from error
        return parse_json(Index, content, str(path))

    def repo_ids(self) -> list[str]:
        return sorted([*self.index.kernels, *self.index.aliases])

    def versions(self, repo_id: str) -> list[int]:
        entries = self.index.kernels.get(self._canonical(repo_id), {})
        return sorted(map(int, entries), reverse=True)

    def find(self, reference: Reference) -> list[Candidate]:
        versions = self.versions(reference.repo_id)
        if reference.version is not None:
            versions = [version for version in versions if version == reference.version]
        elif reference.revision is not None:
            # On the Hub a version is the branch vN; the registry holds released versions and nothing else.
            branch = _VERSION_BRANCH.fullmatch(reference.revision)
            versions = [version for version in versions if branch and version == int(branch[1])]
        repo_id = self._canonical(reference.repo_id)
        entries = self.index.kernels.get(repo_id, {})
        return [Candidate(repo_id, version, entries[str(version)].path) for version in versions]

    def read_metadata(self, candidate: Candidate) -> bytes:
        folder = self.fetch(candidate)
        content = read_metadata_file(folder)
        expected = self.index.kernels[candidate.repo_id][str(candidate.version)].metadata_sha256
        found = hashlib.sha256(content).hexdigest()
        if found != expected:
            raise VerificationError(
                f"{folder / METADATA_FILE} is not the one that the registry's index promises: its SHA-256 is "
                f"{found}, not {expected}; nothing of the kernel was run, reinstall tpu-kernels"
            )
        return content

    def fetch(self, candidate: Candidate) -> Path:
        path = (self.root / candidate.location / "build" / VARIANT).resolve()
        if not path.is_relative_to(self.root.resolve()):
            raise VerificationError(f"{self.root / candidate.location} leads out of the registry {self.root}")
        return path

    def _canonical(self, repo_id: str) -> str:
        return self.index.aliases.get(repo_id, repo_id)


def registry_root() -> Path:
    """The folder of the shipped registry: inside an installed package, beside it in a source checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_registry"
    return installed if installed.is_dir() else package.parent / "registry"


@functools.cache
def default_sources() -> tuple[Source, ...]:
    """The sources that `get_kernel` asks, in order."""
    return (RegistrySource(registry_root()),)


def read_metadata_file(variant: Path) -> bytes:
    """The content of the `metadata.json` in a variant folder.

    Raises:
        VerificationError: It is missing, unreadable or no regular file.
    """
    path = variant / METADATA_FILE
    if path.is_symlink():
        raise VerificationError(f"{path} is a symbolic link; a kernel holds regular files only")
    try:
        return path.read_bytes()
    except OSError as error:
        raise VerificationError(f"{path} cannot be read: {error}") from error


def local_variant(path: Path) -> Path:
    """The variant folder at `path`: a kernel repository, its `build` folder, or the variant folder itself.

    Raises:
        KernelNotFoundError: There is none.
    """
    for folder in (path / "build" / VARIANT, path / VARIANT, path):
        if (folder / METADATA_FILE).is_file():
            return folder.resolve()
    raise KernelNotFoundError(
        f"{path} holds no built kernel: there is no build/{VARIANT}/{METADATA_FILE} in it; "
        "build one with: tpu-kernels build SOURCE --out DIR"
    )
