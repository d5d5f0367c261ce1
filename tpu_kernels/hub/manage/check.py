"""Checking: the digests of the builds on this machine, computed again."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import KernelNotFoundError, TpuKernelsError, VerificationError
from ..cache import HubCache
from ..client import BYTECODE
from ..explanation import ResolvedBuild
from ..layout import METADATA_FILE, list_files, listing_digest
from ..metadata import Metadata, parse_json
from ..reference import Reference
from ..resolve import read_build
from ..sources import (
    INDEX_FILE,
    Files,
    LocalSource,
    RegistrySource,
    Source,
    local_builds,
    read_metadata_file,
)
from ..verify import verify
from .inventory import CachedItem, cached_items, hub_cache_folder, variants_in


@dataclass(frozen=True)
class CheckedBuild:
    """A build that was checked. `violations` is empty where every file is the one its digests promise.

    `kernel` is `org/name`, or the name alone where the organisation is not known; `place` says what holds it.
    """

    kernel: str
    version: int | None
    place: str
    path: Path
    violations: tuple[str, ...]


def check_folder(path: Path) -> list[CheckedBuild]:
    """Checks a registry, a kernel repository or a variant folder.

    Raises:
        KernelNotFoundError: It is none of these.
    """
    if (path / INDEX_FILE).is_file():
        return list(_check_registry(RegistrySource(path, str(path)), None))
    return [_check_variant(variant, str(path)) for variant in local_builds(path)]


def check_kernels(repo_id: str | None, sources: Sequence[Source]) -> list[CheckedBuild]:
    """Checks what is on this machine of a kernel, or of all: in the caches, and in folders among `sources`.

    Raises:
        KernelNotFoundError: There is nothing of it.
    """
    checked: list[CheckedBuild] = []
    for source in sources:
        if isinstance(source, RegistrySource):
            checked += _check_registry(source, repo_id)
        elif isinstance(source, LocalSource):
            checked += _check_overrides(source, repo_id)
    for item in cached_items():
        if item.kernel is not None and _is_of(item, repo_id):
            checked += _check_commit(item) if item.cache == "hub" else [_check_kept(item)]
    if repo_id is not None and not checked:
        raise KernelNotFoundError(
            f"nothing of {repo_id} is on this machine; fetch it with: tpu-kernels download {repo_id}"
        )
    return checked


def _check_variant(variant: Path, place: str) -> CheckedBuild:
    try:
        metadata = parse_json(Metadata, read_metadata_file(variant), str(variant / METADATA_FILE))
    except TpuKernelsError as error:
        return CheckedBuild(variant.name, None, place, variant, _violations(error))
    build = ResolvedBuild(None, str(variant), metadata, lambda: Files(variant))
    return CheckedBuild(metadata.name, metadata.version, place, variant, _check(lambda: build))


def _check_registry(source: RegistrySource, repo_id: str | None) -> Iterator[CheckedBuild]:
    wanted = source.index.aliases.get(repo_id, repo_id) if repo_id is not None else None
    for name, entries in source.index.kernels.items():
        for version in map(int, entries if wanted in (None, name) else ()):
            [candidate] = source.find(Reference(name, version))
            violations = _check(functools.partial(read_build, source, candidate))
            yield CheckedBuild(name, version, source.name, Path(candidate.address), violations)


def _check_overrides(source: LocalSource, repo_id: str | None) -> Iterator[CheckedBuild]:
    for name, folder in source.folders:
        if repo_id in (None, name):
            try:
                yield from (replace(build, kernel=name, place=source.name) for build in check_folder(folder))
            except KernelNotFoundError as error:
                yield CheckedBuild(name, None, source.name, folder, (str(error),))


def _check_commit(item: CachedItem) -> Iterator[CheckedBuild]:
    """The builds of a commit in the Hub's cache, by the listing that came with it."""
    assert item.kernel is not None
    folder = hub_cache_folder()
    listing = HubCache(folder).listing(item.kernel, item.revision)
    for variant in variants_in(item.path):
        prefix = f"build/{variant.name}/"
        ids = {
            path.removeprefix(prefix): entry.id
            for path, entry in (listing or {}).items()
            if path.startswith(prefix) and not any(fnmatch.fnmatch(path, pattern) for pattern in BYTECODE)
        }
        files = Files(variant, listing is None, ids if listing else None, folder, f"delete {item.path}")

        def build(files: Files = files) -> ResolvedBuild:
            path = files.path / METADATA_FILE
            try:
                metadata = parse_json(Metadata, path.read_bytes(), str(path))
            except OSError as error:
                raise VerificationError(f"{path} cannot be read: {error}") from error
            return ResolvedBuild(item.kernel, str(files.path), metadata, lambda: files)

        yield CheckedBuild(item.kernel, item.version, "hub cache", variant, _check(build))


def _check_kept(item: CachedItem) -> CheckedBuild:
    """A build from a bucket, which is named after what it has to hold."""
    assert item.kernel is not None
    violations: tuple[str, ...] = ()
    try:
        files = list_files(item.path, VerificationError)
        listing = {path: hashlib.sha256(file.read_bytes()).hexdigest() for path, file in files.items()}
    except (OSError, VerificationError) as error:
        violations = (str(error),)
    else:
        if listing_digest(listing) != item.revision:
            violations = check_folder(item.path)[0].violations
            if not violations and listing.get(METADATA_FILE) != item.revision:
                violations = ("changed: the files are not those that the folder is named after",)
    return CheckedBuild(item.kernel, item.version, "bucket cache", item.path, violations)


def _is_of(item: CachedItem, repo_id: str | None) -> bool:
    if repo_id is None or item.kernel == repo_id:
        return True
    return item.cache == "builds" and item.kernel == repo_id.partition("/")[2]


def _check(build: Callable[[], ResolvedBuild]) -> tuple[str, ...]:
    try:
        verify(build())
    except TpuKernelsError as error:
        return _violations(error)
    return ()


def _violations(error: TpuKernelsError) -> tuple[str, ...]:
    named = error.violations if isinstance(error, VerificationError) else ()
    return named or (str(error),)
