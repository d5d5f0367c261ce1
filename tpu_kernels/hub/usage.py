"""Who uses what is cached, so that a prune deletes nothing under a running process.

Locks of the operating system on small files, beside what they stand for: shared by those who use it, held
alone by who deletes it. A process drops them when it ends, however it ends. The files themselves stay: one
that is deleted while another process opens it would be two locks.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from ..errors import CopyError
from ..log import get_logger

try:
    import fcntl
except ImportError:  # not on Windows, where then nothing counts as free to delete
    fcntl = None  # type: ignore[assignment]

_FOLDER = "tpu-kernels"
_held: dict[Path, int] = {}
_guard = threading.Lock()


def repository_lock(cache: Path, repo_id: str) -> Path:
    """Taken while something is fetched into a repository's folder of the Hub's cache."""
    return cache / ".locks" / _FOLDER / f"{'--'.join(['kernels', *repo_id.split('/')])}.lock"


def snapshot_lock(cache: Path, repo_id: str, commit: str) -> Path:
    """Held by the processes that use a commit in the Hub's cache."""
    return repository_lock(cache, repo_id).with_suffix("") / f"{commit}.lock"


def hold(lock: Path) -> None:
    """Marks what `lock` stands for as used by this process until it ends, and as used now."""
    with _guard:
        if lock not in _held:
            descriptor = _open(lock)
            if descriptor is None:
                return
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            _held[lock] = descriptor
        with contextlib.suppress(OSError):
            os.utime(lock)


@contextlib.contextmanager
def shared(lock: Path) -> Iterator[None]:
    """Keeps what `lock` stands for from being deleted meanwhile."""
    descriptor = _open(lock)
    try:
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[bool]:
    """Whether nobody uses what `lock` stands for; then nobody can until this is left."""
    descriptor = _open(lock)
    try:
        if descriptor is None:
            yield False
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
    finally:
        if descriptor is not None:
            os.close(descriptor)


@contextlib.contextmanager
def folder_alone(folder: Path | None) -> Iterator[None]:
    """Waits until no other process is in here with `folder`, which is made; does nothing without one."""
    if folder is None or fcntl is None:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise CopyError(f"{folder} cannot be written: {error}") from error
    try:
        # Some network file systems lock no folders.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _open(lock: Path) -> int | None:
    if fcntl is None:
        return None
    with contextlib.suppress(OSError):
        lock.parent.mkdir(parents=True, exist_ok=True)
        return os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        return os.open(lock, os.O_RDONLY)  # in a cache of another user, who may prune it
    except OSError as error:
        # Where nobody can write there is nothing to lose.
        get_logger().debug("%s was not locked: %s", lock, error)
        return None
