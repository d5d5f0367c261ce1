"""Locks: exactly which builds a project runs, by commit and by content.

A lock is two files side by side. `kernels.lock` is stock `kernels`' own, which takes no other keys: a commit
for each kernel. `tpu-kernels.lock` is this library's: for each kernel the SHA-256 of every file of each of its
builds for TPUs, also for kernels that come from a registry and have no commit. Written together, they agree;
a lock that stock wrote has the first file alone, and then the commit is all that is checked.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from ..errors import InvalidMetadataError, LockError
from ..files import replace_file
from .layout import read_document
from .metadata import KernelDependency, Model, NonEmpty, RelativePath, parse_json
from .reference import Reference

DIGESTS_FILE = "tpu-kernels.lock"

_AGAIN = "run: tpu-kernels lock"
_ANEW = "to write it anew, run: tpu-kernels lock --upgrade"

Commit = Annotated[str, Field(pattern=r"^(?:[0-9a-f]{40}|[0-9a-f]{64})$")]
Variant = Annotated[str, Field(pattern=r"^torch[a-z0-9_-]*$")]


class LockedBuild(Model):
    """One build: the SHA-256 of its `metadata.json` in hex, and of each other file in base64."""

    metadata_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    files: Mapping[RelativePath, NonEmpty]


class LockedKernel(KernelDependency):
    """One kernel: its commit, None if it comes from a registry, its builds, and the kernels it depends on.

    There are no builds where only stock `kernels` locked it.
    """

    commit: Commit | None = None
    builds: Mapping[Variant, LockedBuild] = {}
    kernel_depends: Sequence[KernelDependency] = ()


def locked_kernel(
    reference: Reference,
    commit: str | None,
    builds: Mapping[str, LockedBuild] = MappingProxyType({}),
    dependencies: Sequence[KernelDependency] = (),
) -> LockedKernel:
    """The entry for a kernel."""
    fields = {
        "repo-id": reference.repo_id,
        "version": reference.version,
        "revision": reference.revision,
        "commit": commit,
        "builds": dict(builds),
        "kernel-depends": list(dependencies),
    }
    return LockedKernel.model_validate(fields)


class _StockLock(Model):
    commit: Commit


class _StockEntry(Model):
    dependency: KernelDependency
    lock: _StockLock


class _StockFile(RootModel[Sequence[_StockEntry]]):
    """`kernels.lock`."""


class _DigestsFile(Model):
    """`tpu-kernels.lock`."""

    format: Literal[1]
    kernels: Sequence[LockedKernel]


@dataclass(frozen=True)
class Lock:
    """The locked kernels. `origin` says where they are written, `identity` tells locks apart."""

    origin: str
    identity: str
    kernels: tuple[LockedKernel, ...] = field(compare=False)

    def find(self, reference: Reference) -> LockedKernel | None:
        """The kernel that a reference means by this lock.

        Without a version it is the locked one, the first if there are several. A branch `vN` is version N,
        and a commit is the kernel that is locked at it.
        """
        for kernel in self.kernels:
            if kernel.repo_id == reference.repo_id and (
                not reference.pinned
                or reference == kernel.reference
                or reference.revision in (kernel.commit, f"v{kernel.version}")
            ):
                return kernel
        return None

    def problems(self, requirements: Mapping[str, int]) -> list[str]:
        """How the lock differs from what a project asks for; empty if it does not."""
        wanted = {Reference(repo_id, version) for repo_id, version in requirements.items()}
        known = {kernel.reference: kernel for kernel in self.kernels}
        problems = []
        pending, reached = sorted(wanted, key=str), set[Reference]()
        while pending:
            reference = pending.pop(0)
            if reference in reached:
                continue
            reached.add(reference)
            kernel = known.get(reference)
            if kernel is None:
                problems.append(f"not locked: {reference}")
            elif not kernel.builds:
                problems.append(f"locked without digests: {reference}")
            else:
                pending += [dependency.reference for dependency in kernel.kernel_depends]
        return problems + [
            f"locked, but not asked for: {reference}" for reference in known if reference not in reached
        ]


def read_lock(path: Path) -> Lock:
    """The lock in the file `path` and the one beside it.

    Raises:
        LockError: It is missing or malformed, or its two files do not agree.
    """
    # A program asks for its lock at every load; the stamps say whether it has to be read again.
    return _read_lock(path, _stamp(path), _stamp(path.with_name(DIGESTS_FILE)))


def read_former_lock(path: Path) -> Lock | None:
    """What to start a new lock from: the lock so far, or its commits alone where they are not of one piece.

    None where there is none.

    Raises:
        LockError: It is malformed.
    """
    stock = _read(path)
    if stock is None:
        return None
    try:
        return read_lock(path)
    except LockError:
        return parse_lock(stock, None, str(path))


def parse_lock(stock: bytes, digests: bytes | None, origin: str) -> Lock:
    """The lock that the contents of its two files give; the second one is optional.

    Raises:
        LockError: They are malformed or do not agree.
    """
    identity = hashlib.sha256(stock + b"\0" + (digests or b"")).hexdigest()
    try:
        entries = parse_json(_StockFile, stock, origin).root
        ours = parse_json(_DigestsFile, digests, f"{DIGESTS_FILE} beside {origin}").kernels if digests else ()
    except InvalidMetadataError as error:
        raise LockError(f"{error}; {_ANEW}") from error
    commits = {entry.dependency.reference: entry.lock.commit for entry in entries}
    known = {kernel.reference: kernel for kernel in ours}
    if len(commits) != len(entries) or len(known) != len(ours):
        raise LockError(f"{origin} locks a kernel twice; {_ANEW}")
    if digests is not None:
        for reference in [*commits, *known]:
            kernel = known.get(reference)
            if (kernel.commit if kernel else None) != commits.get(reference):
                raise LockError(
                    f"{origin} and the {DIGESTS_FILE} beside it do not agree on {reference}: one of them was "
                    f"written by something else; {_AGAIN}"
                )
    stock_only = [
        locked_kernel(reference, commit) for reference, commit in commits.items() if reference not in known
    ]
    return Lock(origin, identity, (*ours, *stock_only))


def write_lock(path: Path, kernels: Iterable[LockedKernel]) -> None:
    """Writes both files of a lock, each all at once.

    Raises:
        LockError: They cannot be written.
    """
    kernels = list(kernels)
    stock = [
        {"dependency": _dump(kernel, {"repo_id", "version", "revision"}), "lock": {"commit": kernel.commit}}
        for kernel in kernels
        if kernel.commit is not None
    ]
    digests = {"format": 1, "kernels": [_dump(kernel) for kernel in kernels]}
    # The digests first: between the two a reader is told that they do not agree, not served without digests.
    for file, content in ((path.with_name(DIGESTS_FILE), digests), (path, stock)):
        try:
            replace_file(file, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
        except OSError as error:
            raise LockError(f"{file} cannot be written: {error}") from error


@functools.lru_cache(maxsize=8)
def _read_lock(path: Path, *stamps: tuple[int, int] | None) -> Lock:
    stock = _read(path)
    if stock is None:
        raise LockError(f"there is no lock {path}; {_AGAIN}")
    return parse_lock(stock, _read(path.with_name(DIGESTS_FILE)), str(path))


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _read(path: Path) -> bytes | None:
    try:
        return read_document(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LockError(f"{path} cannot be read: {error}") from error


def _dump(kernel: LockedKernel, include: set[str] | None = None) -> dict[str, Any]:
    return kernel.model_dump(by_alias=True, exclude_none=True, include=include)
