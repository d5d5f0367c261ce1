"""Making a lock: from what a project asks for to the builds that it will run."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ..errors import InvalidReferenceError, KernelNotFoundError, LockError, TpuKernelsError
from .layout import METADATA_FILE, digest
from .lock import Lock, LockedBuild, LockedKernel, locked_kernel
from .lock_source import LockSource
from .metadata import Metadata, parse_json
from .reference import Reference
from .sources import Candidate, Source
from .variants import is_for_tpu
from .verify import read_verified


def read_requirements(project: Path) -> dict[str, int]:
    """The kernels that a project asks for, with their versions: `[tool.kernels.dependencies]`.

    Raises:
        LockError: The project has no `pyproject.toml` with such a table, or the table is malformed.

    Example:
        >>> read_requirements(Path("."))  # doctest: +SKIP
        {'acme/relu': 1}
    """
    path = project / "pyproject.toml"
    table = "[tool.kernels.dependencies]"
    try:
        with path.open("rb") as file:
            data = tomllib.load(file)
        found = data.get("tool", {}).get("kernels", {}).get("dependencies")
    except OSError as error:
        raise LockError(f"{path} cannot be read: {error}; name the project's folder") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise LockError(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise LockError(f'{path} asks for no kernels; add: {table} "org/name" = 1')
    try:
        for repo_id, version in found.items():
            Reference(repo_id, version)
            if version is None:
                raise InvalidReferenceError(f"{repo_id} has no version")
    except InvalidReferenceError as error:
        raise LockError(f"{path}: {table}: {error}") from error
    return found


def lock_kernels(
    requirements: Mapping[str, int],
    sources: Sequence[Source],
    former: Lock | None = None,
    *,
    upgrade: bool | Collection[str] = False,
) -> list[LockedKernel]:
    """Locks what a project asks for and what that depends on; all builds for TPUs, whatever runs here.

    Every file is fetched, verified and hashed; nothing of a kernel is run.

    Args:
        requirements: The version asked for of each repository.
        sources: Where to look, in order.
        former: The lock so far. What it holds stays as it is.
        upgrade: Whether to take newer builds of the same versions instead: of all kernels, or those named.

    Raises:
        KernelNotFoundError: No source has a kernel, or not in that version, or without a build for TPUs.
        UntrustedKernelError: Its publisher is not trusted.
        LockError: The kernels depend on each other.
        TpuKernelsError: And whatever else finding and verifying a kernel raises.
    """
    locked: dict[Reference, LockedKernel] = {}

    def visit(reference: Reference, dependants: tuple[Reference, ...]) -> None:
        if reference in dependants:
            cycle = " -> ".join(map(str, [*dependants[dependants.index(reference) :], reference]))
            raise LockError(f"the kernels depend on each other: {cycle}")
        if reference not in locked:
            is_kept = upgrade is not True and reference.repo_id not in (upgrade or ())
            former_kernel = former.find(reference) if former is not None and is_kept else None
            if former is not None and former_kernel is not None:
                kernel = _lock_kernel(reference, [LockSource(former, tuple(sources))])
            else:
                kernel = _lock_kernel(reference, sources)
            locked[reference] = kernel
        for inner in locked[reference].kernel_depends:
            visit(inner.reference, (*dependants, reference))

    for repo_id, version in requirements.items():
        visit(Reference(repo_id, version), ())
    return list(locked.values())


def _lock_kernel(reference: Reference, sources: Sequence[Source]) -> LockedKernel:
    failures: list[TpuKernelsError] = []
    for source in sources:
        for candidate in source.find(reference):
            builds, dependencies = {}, {}
            names = source.variants(candidate)
            variants = (
                [candidate] if names is None else [candidate.of_variant(n) for n in names if is_for_tpu(n)]
            )
            for variant in variants:
                builds[variant.variant], metadata = _lock_build(source, variant)
                dependencies.update({each.reference: each for each in metadata.kernel_depends})
            if builds:
                return locked_kernel(reference, candidate.commit, builds, list(dependencies.values()))
            failures.append(KernelNotFoundError(f"{candidate} has no build for TPUs ({source.name})"))
    if failures:
        raise failures[0]
    looked = ", ".join(source.name for source in sources)
    raise KernelNotFoundError(f"there is no {reference} to lock (looked in: {looked})")


def _lock_build(source: Source, candidate: Candidate) -> tuple[LockedBuild, Metadata]:
    content = source.read_metadata(candidate)
    metadata = parse_json(Metadata, content, f"{candidate} ({source.name}): {METADATA_FILE}")
    files = read_verified(source.files(candidate, metadata), metadata)
    digests = {path: digest(file, "sha256") for path, file in files.items()}
    fields = {"metadata-sha256": hashlib.sha256(content).hexdigest(), "files": digests}
    return LockedBuild.model_validate(fields), metadata
