"""Loading what a lock says: stock `kernels`' `load_kernel` and `get_locked_kernel`."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ..errors import LockError
from .api import agent, check_backend
from .configuration import LOCK_VARIABLE, lock_file, locked_source
from .layout import LOCK_FILE
from .load import load
from .reference import Reference
from .resolve import resolve
from .trust import Trust

if TYPE_CHECKING:
    from .lock import Lock


def load_kernel(
    repo_id: str, *, lockfile: str | os.PathLike[str] | None = None, backend: str | None = None
) -> ModuleType:
    """Loads a kernel that a lock holds, from this machine alone: nothing is downloaded.

    Args:
        repo_id: The kernel's repository, `org/name`.
        lockfile: The lock, a `kernels.lock`. Otherwise it is the one in the metadata of the installed package
            that the caller belongs to, else the one `TPU_KERNELS_LOCK` names, else that of the program's
            project.
        backend: `"tpu"`, which is also the default.

    Raises:
        LockError: There is no lock, it is malformed, or the kernel is not in it.
        SourceUnavailableError: The kernel is not on this machine; `get_locked_kernel` fetches it.
        VerificationError: Its files are not the locked ones; nothing of it was run.
        TpuKernelsError: And whatever else `get_kernel` raises.

    Example:
        >>> import tpu_kernels
        >>> relu = tpu_kernels.load_kernel("acme/relu", lockfile="kernels.lock")  # doctest: +SKIP
    """
    check_backend(repo_id, backend)
    lock = _lock(lockfile, sys._getframe(1).f_globals.get("__name__", ""))
    return _load(repo_id, lock, Trust.of(), None, local_only=True)


def get_locked_kernel(
    repo_id: str,
    *,
    lockfile: str | os.PathLike[str] | None = None,
    trust_remote_code: bool | Iterable[str] = False,
    user_agent: str | Mapping[str, str] | None = None,
) -> ModuleType:
    """Loads a kernel that a lock holds, and downloads it if it is not on this machine.

    Args:
        repo_id: The kernel's repository, `org/name`.
        lockfile: The lock, as for `load_kernel`.
        trust_remote_code: Whom to trust, as for `get_kernel`. The lock vouches for the kernels in it.
        user_agent: What requests to the Hub say about who asks.

    Raises:
        LockError: There is no lock, it is malformed, or the kernel is not in it.
        VerificationError: The kernel's files are not the locked ones; nothing of it was run.
        TpuKernelsError: And whatever else `get_kernel` raises.

    Example:
        >>> import tpu_kernels
        >>> relu = tpu_kernels.get_locked_kernel("acme/relu", lockfile="kernels.lock")  # doctest: +SKIP
    """
    lock = _lock(lockfile, sys._getframe(1).f_globals.get("__name__", ""))
    return _load(repo_id, lock, Trust.of(trust_remote_code), agent(user_agent), local_only=False)


def _load(repo_id: str, lock: Lock, trust: Trust, user_agent: str | None, *, local_only: bool) -> ModuleType:
    reference = Reference(repo_id)
    if lock.find(reference) is None:
        raise LockError(
            f"{repo_id} is not in {lock.origin}; add it to [tool.kernels.dependencies] in pyproject.toml and run: "
            "tpu-kernels lock"
        )
    source = locked_source(lock, trust, user_agent, local_only=local_only)
    return load(resolve(reference, (source,)).unwrap()).module


def _lock(lockfile: str | os.PathLike[str] | None, caller: str) -> Lock:
    from .lock import read_lock

    if lockfile is not None:
        return read_lock(Path(lockfile))
    if (installed := _installed_lock(caller.partition(".")[0])) is not None:
        return installed
    if (path := lock_file()) is not None:
        return read_lock(path)
    raise LockError(
        f"there is no lock: the package of {caller} has none in its metadata, {LOCK_VARIABLE} names none, and the "
        f"program's project has no {LOCK_FILE}; make one with: tpu-kernels lock, or name one: lockfile=..."
    )


def _installed_lock(package: str) -> Lock | None:
    """The lock in the metadata of the distribution that a top-level package belongs to."""
    from .lock import DIGESTS_FILE, parse_lock

    for distribution in importlib.metadata.distributions():
        # Hardly any distribution has a lock, and telling which one owns a package takes much longer.
        text = distribution.read_text(LOCK_FILE)
        if text is not None and package in _packages(distribution):
            digests = distribution.read_text(DIGESTS_FILE)
            origin = f"{LOCK_FILE} of {distribution.metadata['Name']}"
            return parse_lock(text.encode(), digests.encode() if digests is not None else None, origin)
    return None


def _packages(distribution: Distribution) -> set[str]:
    listed = (distribution.read_text("top_level.txt") or "").split()
    files = {file.parts[0].removesuffix(".py") for file in distribution.files or ()}
    return {*listed, *files}
