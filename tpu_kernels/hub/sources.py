"""Sources: where kernels come from.

`resolve` asks the sources of `configured_sources` in order. A new kind of source is one class with the
methods of `Source`, and its place in `configuration`.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self

from ..errors import KernelNotFoundError, VerificationError
from .layout import CARD_FILE, METADATA_FILE, VARIANT, read_document
from .metadata import Index, IndexEntry, Metadata, parse_json
from .reference import Reference

INDEX_FILE = "index.json"

_VERSION_BRANCH = re.compile(r"v([1-9][0-9]*)")


@dataclass(frozen=True)
class Candidate:
    """A build that a source offers for a reference. Nothing of it has been read yet.

    `version` is None where only the build itself says which version it is. `location` is the source's own
    name for the place: a folder, a branch; `address` is that of the variant folder, for readers. `reason`
    says why the source offers the build, where there is more to say than the reference does. `commit` is the
    one it comes from, where it comes from the Hub.
    """

    repo_id: str
    version: int | None
    location: str
    address: str
    reason: str = ""
    variant: str = VARIANT
    commit: str | None = None

    def of_variant(self, name: str) -> Self:
        """Another build of the same version."""
        return replace(self, variant=name, address=f"{self.address.rpartition('/')[0]}/{name}")

    def __str__(self) -> str:
        return f"{self.repo_id} v{self.version}" if self.version is not None else self.repo_id


@dataclass(frozen=True, eq=False)
class Files:
    """The files of a build on this machine, and what they have to agree with before they may run.

    `digests_required` says whether a build whose metadata lists no digests is refused. `git_ids` are the
    names that the files have in the commit they come from, or their SHA-256 (hex) by the index; `locked` is
    the SHA-256 of each file, in base64, that the lock `locked_by` promises. Where `links_into` is a folder, a
    file may be a link to a regular file in it. `remedy` is what to do when the files are not the right ones.
    """

    path: Path
    digests_required: bool = True
    git_ids: Mapping[str, str] | None = None
    links_into: Path | None = None
    remedy: str = "install or build it again"
    locked: Mapping[str, str] | None = None
    locked_by: str = ""


class Source(Protocol):
    """A place that kernels come from. It is hashable: what was loaded is remembered by its sources."""

    @property
    def name(self) -> str:
        """What messages and traces call it."""

    @property
    def binding(self) -> bool:
        """Whether a kernel that it has comes from it or not at all, as the user said which build to take."""

    def repo_ids(self) -> list[str]:
        """The kernels it can list, for suggestions; empty where it cannot list any."""

    def versions(self, repo_id: str) -> list[int]:
        """The versions it has of a kernel, newest first; empty where it does not know the kernel."""

    def find(self, reference: Reference) -> list[Candidate]:
        """The builds that match `reference`, newest first; empty where none does.

        Raises:
            UntrustedKernelError: There are some, of a publisher that is not trusted.
            SourceUnavailableError: It cannot be asked.
        """

    def variants(self, candidate: Candidate) -> Sequence[str] | None:
        """The names of the builds of a candidate's version; None where the candidate is the only one.

        Raises:
            SourceUnavailableError: It cannot be asked.
        """

    def read_metadata(self, candidate: Candidate) -> bytes:
        """The `metadata.json` of a build, as the source vouches for it. No other file is touched."""

    def files(self, candidate: Candidate, metadata: Metadata) -> Files:
        """The variant folder of a build, on this machine; what is not here yet is downloaded."""

    def read_card(self, candidate: Candidate) -> bytes | None:
        """The kernel card (`README.md`), None where there is none. No digest vouches for it."""

    def local_path(self, candidate: Candidate) -> Path | None:
        """The variant folder of a build if it is on this machine. Nothing in it is verified."""


class IndexedSource:
    """A source that knows its builds from an index, which promises the `metadata.json` of each."""

    binding = False

    @functools.cached_property
    def index(self) -> Index:
        """The index, read once."""
        raise NotImplementedError

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
            # On the Hub a version is the branch vN; an index holds released versions and nothing else.
            branch = version_of_branch(reference.revision)
            versions = [version for version in versions if version == branch]
        repo_id = self._canonical(reference.repo_id)
        entries = self.index.kernels.get(repo_id, {})
        return [
            Candidate(repo_id, version, path, self.address(path))
            for version in versions
            for path in [entries[str(version)].path]
        ]

    def variants(self, candidate: Candidate) -> None:
        return None

    def address(self, location: str) -> str:
        """Where the variant folder of a location is, for readers."""
        raise NotImplementedError

    def check_metadata(self, candidate: Candidate, content: bytes, remedy: str) -> bytes:
        """Returns `content` if it is the `metadata.json` that the index promises; raises if it is not."""
        expected = self.promised(candidate)
        found = hashlib.sha256(content).hexdigest()
        if found != expected:
            raise VerificationError(
                f"{candidate.address}/{METADATA_FILE} is not the one that the registry's index promises: its "
                f"SHA-256 is {found}, not {expected}; nothing of the kernel was run, {remedy}"
            )
        return content

    def promised(self, candidate: Candidate) -> str:
        """The SHA-256 (hex) of a build's `metadata.json` by the index."""
        return self.entry(candidate).metadata_sha256

    def entry(self, candidate: Candidate) -> IndexEntry:
        """What the index says about a build."""
        return self.index.kernels[candidate.repo_id][str(candidate.version)]

    def _canonical(self, repo_id: str) -> str:
        return self.index.aliases.get(repo_id, repo_id)


@dataclass(frozen=True)
class RegistrySource(IndexedSource):
    """A folder of built kernels with an index, such as the registry that ships with this package.

    Its kernels are trusted: it came with this package, or the user named it.
    """

    root: Path
    name: str = "registry"

    @functools.cached_property
    def index(self) -> Index:
        path = self.root / INDEX_FILE
        try:
            content = read_document(path)
        except OSError as error:
            raise KernelNotFoundError(
                f"the kernel registry cannot be read: {error}; {self._remedy}, "
                "or in a source checkout run: tpu-kernels build kernels_src --registry registry"
            ) from error
        return parse_json(Index, content, str(path))

    def address(self, location: str) -> str:
        return str(self.root / location / "build" / VARIANT)

    def read_metadata(self, candidate: Candidate) -> bytes:
        return self.check_metadata(candidate, read_metadata_file(self.fetch(candidate)), self._remedy)

    def files(self, candidate: Candidate, metadata: Metadata) -> Files:
        listed = self.entry(candidate).files
        return Files(self.fetch(candidate), digests_required=listed is None, git_ids=listed)

    def read_card(self, candidate: Candidate) -> bytes | None:
        return _read_card(self.fetch(candidate).parents[1])

    def local_path(self, candidate: Candidate) -> Path | None:
        return _if_folder(self.fetch(candidate))

    def fetch(self, candidate: Candidate) -> Path:
        """The variant folder of a build.

        Raises:
            VerificationError: It lies outside of the registry.
        """
        path = Path(candidate.address).resolve()
        if not path.is_relative_to(self.root.resolve()):
            raise VerificationError(f"{candidate.address} leads out of the registry {self.root}")
        return path

    @property
    def _remedy(self) -> str:
        return "reinstall tpu-kernels" if self.name == "registry" else f"build {self.root} again"


@dataclass(frozen=True)
class LocalSource:
    """Builds in folders that the user named for repositories, as `LOCAL_KERNELS` does.

    The folder is taken for any version, as stock `kernels` does: whoever works on a kernel wants to run
    what is there, not to raise its version first.
    """

    folders: tuple[tuple[str, Path], ...]
    name: str = "local"
    binding: bool = True

    def repo_ids(self) -> list[str]:
        return [repo_id for repo_id, _ in self.folders]

    def versions(self, repo_id: str) -> list[int]:
        return []

    def find(self, reference: Reference) -> list[Candidate]:
        return [
            Candidate(repo_id, None, str(folder), str(local_builds(folder)[0]), "LOCAL_KERNELS names it")
            for repo_id, folder in self.folders
            if repo_id == reference.repo_id
        ]

    def variants(self, candidate: Candidate) -> list[str] | None:
        return local_variants(Path(candidate.location))

    def read_metadata(self, candidate: Candidate) -> bytes:
        return read_metadata_file(Path(candidate.address))

    def files(self, candidate: Candidate, metadata: Metadata) -> Files:
        return Files(Path(candidate.address), digests_required=False)

    def read_card(self, candidate: Candidate) -> bytes | None:
        return _read_card(Path(candidate.location))

    def local_path(self, candidate: Candidate) -> Path | None:
        return _if_folder(Path(candidate.address))


def version_of_branch(name: str) -> int | None:
    """The version that a branch holds, None for one that holds no version.

    Example:
        >>> version_of_branch("v2"), version_of_branch("main")
        (2, None)
    """
    branch = _VERSION_BRANCH.fullmatch(name)
    return int(branch[1]) if branch else None


def registry_root() -> Path:
    """The folder of the shipped registry: inside an installed package, beside it in a source checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_registry"
    return installed if installed.is_dir() else package.parent / "registry"


def read_metadata_file(variant: Path) -> bytes:
    """The content of the `metadata.json` in a variant folder.

    Raises:
        VerificationError: It is missing, unreadable or no regular file.
    """
    path = variant / METADATA_FILE
    if path.is_symlink():
        raise VerificationError(f"{path} is a symbolic link; a kernel holds regular files only")
    try:
        return read_document(path)
    except OSError as error:
        raise VerificationError(f"{path} cannot be read: {error}") from error


def _if_folder(path: Path) -> Path | None:
    return path if path.is_dir() else None


def _read_card(repository: Path) -> bytes | None:
    try:
        return (repository / CARD_FILE).read_bytes()
    except OSError:
        return None


def local_builds(path: Path) -> list[Path]:
    """The variant folders of a kernel repository or its `build` folder; `path` alone if it is one itself.

    Raises:
        KernelNotFoundError: There are none.
    """
    if (path / METADATA_FILE).is_file():
        return [path.resolve()]
    for folder in (path / "build", path):
        if builds := sorted(file.parent.resolve() for file in folder.glob(f"*/{METADATA_FILE}")):
            return builds
    raise KernelNotFoundError(
        f"{path} holds no built kernel: there is no build/{VARIANT}/{METADATA_FILE} in it; "
        "build one with: tpu-kernels build SOURCE --out DIR"
    )


def local_variants(path: Path) -> list[str] | None:
    """The names of the builds at `path`, None if it is the folder of one, which may have any name."""
    return None if (path / METADATA_FILE).is_file() else [build.name for build in local_builds(path)]
