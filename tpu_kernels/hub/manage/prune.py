"""Pruning: old builds deleted from the caches, none that a process uses, nothing outside of them."""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from ...errors import ConfigurationError
from ...log import get_logger
from .. import usage
from ..bucket import build_lock
from .inventory import CachedItem, hub_cache_folder, scan_hub_cache

# Seconds after which what an interrupted download left is taken for abandoned.
_ABANDONED = 24 * 3600


@dataclass(frozen=True)
class PruneReport:
    """What was deleted (or would be), and what was spared: used by a process, or not to be deleted safely."""

    removed: tuple[CachedItem, ...]
    in_use: tuple[CachedItem, ...]
    failed: tuple[CachedItem, ...]


def prune(
    items: Iterable[CachedItem],
    *,
    older_than: timedelta | None = None,
    keep_latest: int | None = None,
    dry_run: bool = False,
) -> PruneReport:
    """Deletes those of `items` that were not used for `older_than` and are not among the newest.

    What interrupted downloads left a day ago or earlier goes too.

    Args:
        older_than: Spare what was used since. Without it age does not matter.
        keep_latest: Spare this many of the newest versions of each kernel.
        dry_run: Delete nothing, only say what would be.

    Raises:
        ConfigurationError: Neither limit is given.
    """
    if older_than is None and keep_latest is None:
        raise ConfigurationError(
            "nothing says what to prune; give an age (older-than), a number of versions (keep-latest), or both"
        )
    chosen = _choose(list(items), older_than, keep_latest)
    commits = [item for item in chosen if item.cache == "hub" and not item.leftover]
    removed: list[CachedItem] = []
    failed: list[CachedItem] = []
    with contextlib.ExitStack() as locks:
        free = _lock(chosen, locks)
        if dry_run:
            removed = free
        else:
            gone = _delete_commits([item for item in free if item in commits])
            gone += [item for item in free if item not in commits and _delete_path(item)]
            removed = [item for item in free if item in gone]
            failed = [item for item in free if item not in gone]
    return PruneReport(tuple(removed), tuple(item for item in chosen if item not in free), tuple(failed))


def _choose(
    items: Sequence[CachedItem], older_than: timedelta | None, keep_latest: int | None
) -> list[CachedItem]:
    now = time.time()
    spared = set()
    if keep_latest is not None:
        kernels: dict[tuple[str, str], list[CachedItem]] = defaultdict(list)
        for item in items:
            if item.kernel is not None:
                kernels[item.cache, item.kernel].append(item)
        for versions in kernels.values():
            newest_first = sorted(
                versions, key=lambda item: (item.version or 0, item.last_used), reverse=True
            )
            spared.update(newest_first[:keep_latest])

    def goes(item: CachedItem) -> bool:
        age = now - item.last_used
        if item.leftover:
            return age > _ABANDONED
        if item.kernel is None and older_than is None:
            return False
        return item not in spared and (older_than is None or age > older_than.total_seconds())

    return [item for item in items if goes(item)]


def _lock(items: Sequence[CachedItem], locks: contextlib.ExitStack) -> list[CachedItem]:
    """Those of `items` that no process uses; none can until the locks are released."""
    folder = hub_cache_folder()

    @functools.cache
    def alone(lock: Path) -> bool:
        return locks.enter_context(usage.alone(lock))

    free = []
    for item in items:
        if item.cache == "hub" and item.kernel is not None:
            # Commits share files, so nothing may be fetched into the repository either.
            is_free = alone(usage.repository_lock(folder, item.kernel)) and alone(
                usage.snapshot_lock(folder, item.kernel, item.revision)
            )
        else:
            # A leftover is nobody's, and an outcome of the compiler is read at once.
            is_free = item.cache != "builds" or item.leftover or alone(build_lock(item.revision))
        if is_free:
            free.append(item)
    return free


def _delete_commits(items: Sequence[CachedItem]) -> list[CachedItem]:
    """Deletes commits from the Hub's cache, with the files that no other one needs; returns those deleted."""
    # What the cache holds may have changed since the items were listed; now it cannot.
    info = scan_hub_cache(hub_cache_folder()) if items else None
    for repository in info.repos if info else ():
        revisions = [item.revision for item in items if item.kernel == repository.repo_id]
        if info is None or repository.repo_type != "kernel" or not revisions:
            continue
        plan = replace(info, repos=frozenset([repository])).delete_revisions(*revisions)
        listings = {repository.repo_path / "trees" / f"{commit}.json" for commit in revisions}
        paths = {*plan.repos, *plan.snapshots, *plan.refs, *plan.blobs, *listings}
        root = hub_cache_folder().resolve()
        folders = {*plan.repos, *plan.snapshots}
        if any(path.is_symlink() for path in folders) or not all(_is_in(path, root) for path in paths):
            get_logger().warning("%s leads out of the cache %s; left alone", repository.repo_path, root)
            continue
        try:
            plan.execute()
            for listing in listings:
                listing.unlink(missing_ok=True)
        except OSError as error:
            get_logger().warning("%s was not deleted in full: %s", repository.repo_path, error)
    return [item for item in items if not item.path.exists()]


def _is_in(path: Path, root: Path) -> bool:
    """Whether deleting `path` deletes something below `root`. A link is deleted itself, not what it leads to."""
    return path.parent.resolve().is_relative_to(root)


def _delete_path(item: CachedItem) -> bool:
    try:
        if item.path.is_dir() and not item.path.is_symlink():
            # Out of the way first: what is deleted in part must not be taken for a build.
            doomed = item.path.with_name(f".pruned-{item.path.name}")
            item.path.rename(doomed)
            shutil.rmtree(doomed)
        else:
            item.path.unlink(missing_ok=True)
    except OSError as error:
        get_logger().warning("%s was not deleted: %s", item.path, error)
        return False
    return True
