"""A lock as a source: it says which build, the sources behind it say where that is."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import KernelNotFoundError, VerificationError
from .lock import Lock, LockedBuild, LockedKernel
from .metadata import Metadata
from .reference import Reference
from .sources import Candidate, Files, IndexedSource, Source


@dataclass(frozen=True)
class _Locked(Candidate):
    """A candidate of another source, and the lock's word on it."""

    kernel: LockedKernel | None = None
    origin: Source | None = None


@dataclass(frozen=True)
class LockSource:
    """The kernels of a lock, served by `sources`, wherever the very build is that is locked.

    A build is found by its digests in a registry or a bucket, and by its commit on the Hub. It is that build
    or an error: no other one quietly takes its place.
    """

    lock: Lock
    sources: tuple[Source, ...]
    name: str = "lock"
    binding: bool = True

    def repo_ids(self) -> list[str]:
        return sorted({kernel.repo_id for kernel in self.lock.kernels})

    def versions(self, repo_id: str) -> list[int]:
        kernels = [kernel for kernel in self.lock.kernels if kernel.repo_id == repo_id]
        return sorted((kernel.version for kernel in kernels if kernel.version is not None), reverse=True)

    def find(self, reference: Reference) -> list[Candidate]:
        kernel = self.lock.find(reference)
        if kernel is None:
            return []
        differing = []
        for source in self.sources:
            for candidate in self._offers(kernel, source):
                if isinstance(source, IndexedSource) and not _promises(source, candidate, kernel):
                    differing.append(candidate.address)
                    continue
                reason = f"{self.lock.origin} locks it; from the {source.name}"
                version = candidate.version if kernel.version is None else kernel.version
                values = {**vars(candidate), "version": version, "reason": reason}
                return [_Locked(**values, kernel=kernel, origin=source)]
        looked = ", ".join(source.name for source in self.sources)
        if differing:
            raise VerificationError(
                f"{kernel.reference} is not the build that {self.lock.origin} locks: {', '.join(differing)} holds "
                f"another one; to take that, run: tpu-kernels lock --upgrade-kernel {kernel.repo_id}"
            )
        raise KernelNotFoundError(
            f"{kernel.reference} is locked by {self.lock.origin}, and none of its sources has it ({looked})"
        )

    def variants(self, candidate: Candidate) -> Sequence[str] | None:
        return _source(candidate).variants(candidate)

    def read_metadata(self, candidate: Candidate) -> bytes:
        content = _source(candidate).read_metadata(candidate)
        build = self._build(candidate)
        found = hashlib.sha256(content).hexdigest()
        if build is not None and build.metadata_sha256 != found:
            raise VerificationError(
                f"the metadata.json in {candidate.address} is not the one that {self.lock.origin} locks: its SHA-256 "
                f"is {found}, not {build.metadata_sha256}; nothing of the kernel was run"
            )
        return content

    def files(self, candidate: Candidate, metadata: Metadata) -> Files:
        files = _source(candidate).files(candidate, metadata)
        build = self._build(candidate)
        return replace(files, locked=build.files, locked_by=self.lock.origin) if build is not None else files

    def read_card(self, candidate: Candidate) -> bytes | None:
        return _source(candidate).read_card(candidate)

    def local_path(self, candidate: Candidate) -> Path | None:
        return _source(candidate).local_path(candidate)

    def _offers(self, kernel: LockedKernel, source: Source) -> list[Candidate]:
        if isinstance(source, IndexedSource):
            return source.find(kernel.reference)
        # What the Hub calls the version now is not asked for.
        return source.find(Reference(kernel.repo_id, revision=kernel.commit)) if kernel.commit else []

    def _build(self, candidate: Candidate) -> LockedBuild | None:
        """What the lock says about a build; None where stock `kernels` wrote it, which locks commits alone."""
        kernel = _kernel(candidate)
        if not kernel.builds:
            return None
        build = kernel.builds.get(candidate.variant)
        if build is None:
            raise VerificationError(
                f"{candidate} {candidate.variant} is not in {self.lock.origin}, which locks "
                f"{', '.join(sorted(kernel.builds))}; lock it again: tpu-kernels lock --upgrade-kernel {kernel.repo_id}"
            )
        return build


def _promises(source: IndexedSource, candidate: Candidate, kernel: LockedKernel) -> bool:
    return not kernel.builds or source.promised(candidate) in {
        build.metadata_sha256 for build in kernel.builds.values()
    }


def _kernel(candidate: Candidate) -> LockedKernel:
    assert isinstance(candidate, _Locked)
    assert candidate.kernel is not None
    return candidate.kernel


def _source(candidate: Candidate) -> Source:
    assert isinstance(candidate, _Locked)
    assert candidate.origin is not None
    return candidate.origin
