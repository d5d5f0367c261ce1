"""What this library keeps on this machine: kernels in the Hub's cache, and builds from buckets."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...errors import InvalidMetadataError
from .. import usage
from ..bucket import build_lock, builds_folder
from ..configuration import CACHE_VARIABLE
from ..layout import METADATA_FILE
from ..metadata import Metadata, parse_json
from ..sources import version_of_branch
from ..variants import is_for_tpu

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, HFCacheInfo

CacheName = Literal["hub", "builds", "compile", "simulate", "project"]

_BUILD = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class CachedItem:
    """Something that is kept: a build of a kernel, or what an interrupted download left.

    Attributes:
        cache: `hub`, the Hub's cache; `builds`, what came from buckets; `compile`, outcomes of the compiler.
        kernel: `org/name`, or the name alone where the cache does not know the organisation; None for what
            is no kernel.
        version: None where it cannot be told.
        revision: The commit, or the digest that names a build.
        path: Its folder or file.
        size: Bytes. Files that two commits share count for both.
        last_used: Seconds since the epoch: the last load by this library or access to a file.
        leftover: An interrupted download left it.
    """

    cache: CacheName
    kernel: str | None
    version: int | None
    revision: str
    path: Path
    size: int
    last_used: float
    leftover: bool = False


def hub_cache_folder() -> Path:
    """The cache of the Hub: `KERNELS_CACHE`, else that of huggingface_hub."""
    from huggingface_hub import constants

    return Path(os.environ.get(CACHE_VARIABLE) or constants.HF_HUB_CACHE).expanduser()


def cached_items() -> list[CachedItem]:
    """The kernels that are kept, and what interrupted downloads of kernels left.

    Example:
        >>> [item.kernel for item in cached_items()]  # doctest: +SKIP
        ['kernels-community/ragged-dot-tpu']
    """
    items = [*_hub_items(), *_build_items()]
    return sorted(
        items, key=lambda item: (item.cache, item.kernel or "", -(item.version or 0), item.revision)
    )


def scan_hub_cache(folder: Path) -> HFCacheInfo | None:
    """huggingface_hub's own record of its cache; None where there is no cache."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return scan_cache_dir(folder)
    except (CacheNotFound, ValueError):
        return None


def variants_in(repository: Path) -> list[Path]:
    """The variant folders of a kernel repository that are for TPUs."""
    return [path for path in sorted(repository.glob("build/*")) if is_for_tpu(path.name)]


def read_metadata(variant: Path) -> Metadata | None:
    """What a variant folder says about itself, None where that cannot be read."""
    with contextlib.suppress(OSError, InvalidMetadataError):
        path = variant / METADATA_FILE
        return parse_json(Metadata, path.read_bytes(), str(path))
    return None


def _hub_items() -> Iterator[CachedItem]:
    folder = hub_cache_folder()
    info = scan_hub_cache(folder)
    for repository in info.repos if info else ():
        if repository.repo_type == "kernel":
            for revision in repository.revisions:
                # The cache is stock's too: what is for other hardware is not ours to count.
                if variants := variants_in(revision.snapshot_path):
                    yield _hub_item(folder, repository, revision, variants[0])
    for file in info.incomplete_files if info else ():
        if file.file_path.is_relative_to(folder.resolve()) and file.file_path.parts[-3].startswith(
            "kernels--"
        ):
            with contextlib.suppress(OSError):
                used = file.file_path.stat().st_mtime
                yield CachedItem(
                    "hub",
                    None,
                    None,
                    file.file_path.name,
                    file.file_path,
                    file.size_on_disk,
                    used,
                    leftover=True,
                )


def _hub_item(
    folder: Path, repository: CachedRepoInfo, revision: CachedRevisionInfo, variant: Path
) -> CachedItem:
    versions = [version for ref in revision.refs if (version := version_of_branch(ref)) is not None]
    metadata = read_metadata(variant)
    lock = usage.snapshot_lock(folder, repository.repo_id, revision.commit_hash)
    times = [max(file.blob_last_accessed, file.blob_last_modified) for file in revision.files]
    return CachedItem(
        "hub",
        repository.repo_id,
        max(versions) if versions else metadata.version if metadata else None,
        revision.commit_hash,
        revision.snapshot_path,
        revision.size_on_disk,
        max([revision.last_modified, *times, *_modified(lock)]),
    )


def _build_items() -> Iterator[CachedItem]:
    folder = builds_folder()
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_symlink() or not path.is_dir():
            continue
        files = [file.lstat() for file in path.rglob("*") if file.is_file()]
        size = sum(file.st_size for file in files)
        metadata = read_metadata(path)
        times = [max(file.st_mtime, file.st_atime) for file in files]
        used = max([*times, *_modified(path), *_modified(build_lock(path.name))], default=0.0)
        whole = bool(_BUILD.fullmatch(path.name))
        yield CachedItem(
            "builds",
            metadata.name if metadata and whole else None,
            metadata.version if metadata and whole else None,
            path.name,
            path,
            size,
            used,
            leftover=not whole,
        )


def _modified(path: Path) -> list[float]:
    with contextlib.suppress(OSError):
        return [path.stat().st_mtime]
    return []
