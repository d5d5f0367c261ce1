"""Mirrors: kernels copied into a registry of one's own, a folder or a bucket, for machines without the Hub.

A build is copied file by file, each compared with what is there, then read back; the index, which makes it
visible, comes last. So a mirror that is killed serves what it served before, and goes on where it stopped when
it is run again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import (
    CopyError,
    IncompatibleKernelError,
    KernelNotFoundError,
    SourceUnavailableError,
    TpuKernelsError,
)
from .. import usage
from ..explanation import ResolvedBuild
from ..layout import CARD_FILE, METADATA_FILE, VARIANT, listing_digest
from ..metadata import Index, IndexEntry, parse_object
from ..reference import Reference
from ..resolve import read_build
from ..sources import Candidate, Source, version_of_branch
from ..storage import Storage
from .artifact import fetch_artifact
from .publish import Additions, place, promises, publish, read_index

Versions = Sequence[int] | Literal["all", "newest"]


@dataclass(frozen=True)
class MirroredBuild:
    """What became of one version of a kernel.

    `copied` and `kept` count the files that were written, and those that were there and right; `size` is the
    bytes of both. A dry run knows none of them. `indexed` says whether the mirror served this build before.
    """

    repo_id: str
    version: int
    path: str
    indexed: bool
    copied: int | None = None
    kept: int | None = None
    size: int | None = None


@dataclass(frozen=True)
class Failure:
    """A kernel that was not mirrored, or not in full, and why."""

    kernel: str
    error: TpuKernelsError


@dataclass(frozen=True)
class MirrorReport:
    """What `mirror` did. `skipped` names the versions without a build for TPUs."""

    builds: tuple[MirroredBuild, ...]
    skipped: tuple[str, ...]
    failures: tuple[Failure, ...]


def mirror(
    references: Sequence[Reference],
    target: str,
    source: Source,
    *,
    versions: Versions = "all",
    dry_run: bool = False,
    on_build: Callable[[str], None] = lambda name: None,
) -> MirrorReport:
    """Copies kernels, and those they depend on, from `source` into the registry at `target`, which may be new.

    Whether a build runs on this machine does not matter. What cannot be copied is in the report, and the rest
    is copied all the same. Two processes that write to one folder wait for each other. In a bucket, whoever
    writes the index last may drop what another one added at that moment: run the command again, which copies
    nothing and adds the entries.

    Args:
        references: The kernels. `versions` says which versions of one that names none.
        target: A folder, or a URL that fsspec writes to, such as `gs://bucket/kernels`.
        dry_run: Only say what would be copied.
        on_build: Called with the name of each build before it is copied.

    Raises:
        InvalidMetadataError: The index at `target` is malformed.
        SourceUnavailableError: `target` cannot be read.
        CopyError: `target` cannot be written.

    Example:
        >>> from tpu_kernels.hub.sources import RegistrySource, registry_root
        >>> shipped = RegistrySource(registry_root())
        >>> report = mirror([Reference("tpu-kernels/ragged-dot", 1)], "memory://example", shipped)
        >>> [build.path for build in report.builds]
        ['tpu-kernels/ragged-dot/v1']
    """
    storage = Storage(target)
    builds: list[MirroredBuild] = []
    skipped: list[str] = []
    failures: list[Failure] = []
    additions = Additions({}, {})
    with usage.folder_alone(None if dry_run else storage.folder):
        index = read_index(storage)
        pending = list(references)
        for reference in pending:  # which grows
            try:
                for candidate, build in _wanted(reference, source, versions, skipped):
                    on_build(str(candidate))
                    depends = _dependencies(candidate, build)
                    pending += [dependency for dependency in depends if dependency not in pending]
                    if dry_run:
                        builds.append(_plan(index, source, candidate, build))
                        continue
                    copied, entry = _copy_build(storage, index, source, candidate, build)
                    builds.append(copied)
                    additions.add(reference.repo_id, copied.repo_id, copied.version, entry)
            except TpuKernelsError as error:
                failures.append(Failure(str(reference), error))
        if additions.entries:
            publish(storage, additions)
    return MirrorReport(tuple(builds), tuple(skipped), tuple(failures))


def _dependencies(candidate: Candidate, build: ResolvedBuild) -> list[Reference]:
    """The kernels that a build depends on.

    Raises:
        CopyError: One of them is none that a mirror can have.
    """
    references = [dependency.reference for dependency in build.metadata.kernel_depends]
    for reference in references:
        if reference.revision is not None and version_of_branch(reference.revision) is None:
            raise CopyError(f"{candidate} depends on {reference}; a mirror holds versions, and no revisions")
    return references


def _wanted(
    reference: Reference, source: Source, versions: Versions, skipped: list[str]
) -> Iterator[tuple[Candidate, ResolvedBuild]]:
    """The builds of a kernel to copy, newest first."""
    candidates = source.find(reference)
    # What is named has to be there; else the versions for other hardware are passed over.
    named = reference.pinned or not isinstance(versions, str)
    if not reference.pinned and not isinstance(versions, str):
        _check_versions(reference, source, versions)
        candidates = [candidate for candidate in candidates if candidate.version in versions]
    if not candidates:
        have = ", ".join(map(str, source.versions(reference.repo_id)))
        raise KernelNotFoundError(f"{source.name} has no {reference}; it has versions: {have or 'none'}")
    found = False
    for candidate in candidates:
        try:
            build = read_build(source, candidate)
        except IncompatibleKernelError:
            if named:
                raise
            skipped.append(str(candidate))
            continue
        yield candidate, build
        found = True
        if versions == "newest" and not named:
            return
    if not found:
        raise IncompatibleKernelError(f"no version of {reference.repo_id} in {source.name} is for TPUs")


def _check_versions(reference: Reference, source: Source, versions: Sequence[int]) -> None:
    have = source.versions(reference.repo_id)
    if missing := sorted(set(versions) - set(have)):
        raise KernelNotFoundError(
            f"{source.name} has no version {', '.join(map(str, missing))} of {reference.repo_id}; "
            f"it has versions: {', '.join(map(str, have)) or 'none'}"
        )


def _plan(index: Index, source: Source, candidate: Candidate, build: ResolvedBuild) -> MirroredBuild:
    repo_id, version = candidate.repo_id, build.metadata.version
    sha256 = hashlib.sha256(source.read_metadata(candidate)).hexdigest()
    indexed = promises(index, repo_id, version, {METADATA_FILE: sha256}, metadata_only=True)
    return MirroredBuild(repo_id, version, place(index, repo_id, version, sha256, indexed=indexed), indexed)


def _copy_build(
    storage: Storage, index: Index, source: Source, candidate: Candidate, build: ResolvedBuild
) -> tuple[MirroredBuild, Mapping[str, Any]]:
    """Copies a build; returns what was done, and the entry that the index gets for it."""
    repo_id, version = candidate.repo_id, build.metadata.version
    artifact = fetch_artifact(build)
    listing = {name: hashlib.sha256(content).hexdigest() for name, content in artifact.files.items()}
    indexed = promises(index, repo_id, version, listing)
    path = place(index, repo_id, version, listing_digest(listing), indexed=indexed)
    entry = {"path": path, "metadata-sha256": listing[METADATA_FILE], "files": listing}
    parse_object(IndexEntry, entry, str(candidate))  # refuses names of files that readers would
    files = {f"build/{VARIANT}/{name}": content for name, content in artifact.files.items()}
    if card := _card(source, candidate):
        files[CARD_FILE] = card
    copied = _copy_files(storage, path, files)
    done = MirroredBuild(
        repo_id, version, path, indexed, copied, len(files) - copied, sum(map(len, files.values()))
    )
    return done, entry


def _card(source: Source, candidate: Candidate) -> bytes | None:
    try:
        return source.read_card(candidate)
    except SourceUnavailableError:
        return None  # it was never fetched and the Hub cannot be asked; the kernel works without it


def _copy_files(storage: Storage, path: str, files: Mapping[str, bytes]) -> int:
    """Makes a folder of the mirror hold `files`; returns how many had to be written."""
    absent = [name for name, content in files.items() if storage.read(f"{path}/{name}") != content]
    for name in absent:
        storage.write(f"{path}/{name}", files[name])
    for name in absent:
        if storage.read(f"{path}/{name}") != files[name]:
            raise CopyError(
                f"{storage.url}: {path}/{name} does not hold what was written to it, so the build was not put "
                "into the index; run the command again"
            )
    # What a mirror of another build left there would be refused, as files that nothing lists.
    for name in storage.names(path):
        if name not in files:
            storage.remove(f"{path}/{name}")
    return len(absent)
