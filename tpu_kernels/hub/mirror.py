"""Mirrors: kernels copied into a registry of one's own, a folder or a bucket, for machines without the Hub.

A build is copied file by file, each compared with what is there, then read back; the index, which makes it
visible, comes last. So a mirror that is killed serves what it served before, and goes on where it stopped when
it is run again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import (
    CopyError,
    IncompatibleKernelError,
    KernelNotFoundError,
    SourceUnavailableError,
    TpuKernelsError,
)
from . import usage
from .artifact import fetch_artifact
from .layout import CARD_FILE, METADATA_FILE, VARIANT, dump_json, listing_digest
from .metadata import Index, IndexEntry, parse_json, parse_object
from .reference import Reference
from .resolve import ResolvedBuild, read_build
from .sources import INDEX_FILE, Candidate, Source
from .storage import Storage

Versions = Sequence[int] | Literal["all", "newest"]

_ATTEMPTS = 5  # at writing an index that others write to


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
    """Copies kernels from `source` into the registry at `target`, which may be new.

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
    additions = _Additions({}, {})
    with usage.folder_alone(None if dry_run else storage.folder):
        index = _read_index(storage)
        for reference in references:
            try:
                for candidate, build in _wanted(reference, source, versions, skipped):
                    on_build(str(candidate))
                    if dry_run:
                        builds.append(_plan(index, source, candidate, build))
                        continue
                    copied, entry = _copy_build(storage, index, source, candidate, build)
                    builds.append(copied)
                    additions.add(reference.repo_id, copied, entry)
            except TpuKernelsError as error:
                failures.append(Failure(str(reference), error))
        if additions.entries:
            _publish(storage, additions)
    return MirrorReport(tuple(builds), tuple(skipped), tuple(failures))


@dataclass(frozen=True)
class _Additions:
    """What comes into the index: entries by repository and version, and other names of repositories."""

    entries: dict[tuple[str, int], Mapping[str, Any]]
    aliases: dict[str, str]

    def add(self, name: str, build: MirroredBuild, entry: Mapping[str, Any]) -> None:
        self.entries[build.repo_id, build.version] = entry
        if name != build.repo_id:
            self.aliases[name] = build.repo_id


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
    entry = index.kernels.get(repo_id, {}).get(str(version))
    indexed = entry is not None and entry.metadata_sha256 == sha256
    return MirroredBuild(repo_id, version, _place(index, repo_id, version, sha256, indexed=indexed), indexed)


def _copy_build(
    storage: Storage, index: Index, source: Source, candidate: Candidate, build: ResolvedBuild
) -> tuple[MirroredBuild, Mapping[str, Any]]:
    """Copies a build; returns what was done, and the entry that the index gets for it."""
    repo_id, version = candidate.repo_id, build.metadata.version
    artifact = fetch_artifact(build)
    listing = {name: hashlib.sha256(content).hexdigest() for name, content in artifact.files.items()}
    indexed = _same(index.kernels.get(repo_id, {}).get(str(version)), listing)
    path = _place(index, repo_id, version, listing_digest(listing), indexed=indexed)
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


def _same(entry: IndexEntry | None, listing: Mapping[str, str]) -> bool:
    """Whether an entry of the index promises the build with these files."""
    if entry is None or entry.metadata_sha256 != listing[METADATA_FILE]:
        return False
    return entry.files is None or entry.files == listing


def _place(index: Index, repo_id: str, version: int, digest: str, *, indexed: bool) -> str:
    """The folder for a build: where it is, else `vN`, else beside the build that has that place.

    The builds that the index promises are never overwritten: whoever reads the mirror meanwhile, or after
    this was killed, finds what was promised.
    """
    if indexed:
        return index.kernels[repo_id][str(version)].path
    plain = f"{repo_id}/v{version}"
    taken = {entry.path for entries in index.kernels.values() for entry in entries.values()}
    return f"{plain}-{digest[:12]}" if plain in taken else plain


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


def _publish(storage: Storage, additions: _Additions) -> None:
    """Adds to the index. What is in it from others stays."""
    for _ in range(_ATTEMPTS):
        content = storage.read(INDEX_FILE)
        merged = _merge(content, additions, f"{storage.url}/{INDEX_FILE}")
        if content == merged:
            return
        storage.write(INDEX_FILE, merged)
    raise CopyError(f"others keep changing the index of {storage.url}; run the command again later")


def _merge(content: bytes | None, additions: _Additions, origin: str) -> bytes:
    if content is not None:
        parse_json(Index, content, origin)
    # As plain data: of what a newer release may have put there, the model would keep nothing.
    index: dict[str, Any] = json.loads(content) if content is not None else {}
    kernels, aliases = index.setdefault("kernels", {}), index.setdefault("aliases", {})
    for (repo_id, version), entry in additions.entries.items():
        kernels.setdefault(repo_id, {})[str(version)] = entry
    aliases.update({name: repo_id for name, repo_id in additions.aliases.items() if name not in kernels})
    parse_object(Index, index, origin)
    return dump_json(index)


def _read_index(storage: Storage) -> Index:
    content = storage.read(INDEX_FILE)
    return Index() if content is None else parse_json(Index, content, f"{storage.url}/{INDEX_FILE}")
