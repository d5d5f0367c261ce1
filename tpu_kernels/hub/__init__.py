"""The kernel hub: finds a kernel, proves that it is the right one, and loads it.

Data flows through one module a stage, each of which knows only those before it::

    reference -> sources -> resolve -> verify -> load

Importing this package loads neither torch nor jax.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType

from ..log import warn_once
from .load import LoadedKernel, find_loaded
from .load import load as _load
from .load import loaded_kernels as _loaded_kernels
from .reference import Reference
from .resolve import Decision, Explanation, resolve_local
from .resolve import resolve as _resolve
from .sources import Source, default_sources, registry_root

__all__ = [
    "Decision",
    "Explanation",
    "LoadedKernel",
    "explain",
    "find_loaded",
    "get_kernel",
    "get_loaded_kernels",
    "get_local_kernel",
    "has_kernel",
    "registry_root",
]


def get_kernel(repo_id: str, *, version: int | None = None, revision: str | None = None) -> ModuleType:
    """Loads a kernel and returns its module.

    Args:
        repo_id: The kernel's repository, `org/name`.
        version: The version to load; the newest one that runs here if neither this nor `revision` is given,
            with a warning that a pin is better.
        revision: A branch, tag or commit to load instead of a version.

    Raises:
        InvalidReferenceError: `repo_id`, `version` or `revision` is malformed.
        KernelNotFoundError: No source has the kernel, or not in that version.
        IncompatibleKernelError: It does not run with what is installed.
        InvalidMetadataError: Its metadata is malformed.
        VerificationError: Its files are not the ones its digests promise; nothing of it was run.

    Example:
        >>> import tpu_kernels
        >>> ragged_dot = tpu_kernels.get_kernel("tpu-kernels/ragged-dot", version=1)  # doctest: +SKIP
    """
    reference = Reference(repo_id, version, revision)
    loaded = _load_reference(reference, default_sources())
    if not reference.pinned:
        warn_once(
            f"{repo_id}: no version was asked for, so the newest is loaded, and that can change; "
            f"pin it: get_kernel({repo_id!r}, version={loaded.version})"
        )
    return loaded.module


def has_kernel(repo_id: str, *, version: int | None = None, revision: str | None = None) -> bool:
    """Whether `get_kernel` would find a build that runs here. Its files are not verified.

    A missing kernel or version, or one that does not run here, is a False, not an error.

    Raises:
        InvalidReferenceError: `repo_id`, `version` or `revision` is malformed.

    Example:
        >>> import tpu_kernels
        >>> tpu_kernels.has_kernel("tpu-kernels/no-such-kernel")
        False
    """
    return explain(repo_id, version=version, revision=revision).build is not None


def explain(repo_id: str, *, version: int | None = None, revision: str | None = None) -> Explanation:
    """What `get_kernel` would load and why, or why it would not; nothing is loaded.

    Raises:
        InvalidReferenceError: `repo_id`, `version` or `revision` is malformed.

    Example:
        >>> import tpu_kernels
        >>> print(tpu_kernels.explain("tpu-kernels/ragged-dot"))  # doctest: +SKIP
        tpu-kernels/ragged-dot, newest version
          registry: tpu-kernels/ragged-dot v1: accepted: the newest version that runs here
          chosen: .../registry/tpu-kernels/ragged-dot/v1/build/torch-tpu
    """
    return _resolve(Reference(repo_id, version, revision), default_sources())


def get_local_kernel(repo_path: str | Path) -> ModuleType:
    """Loads a built kernel from a folder and returns its module.

    Args:
        repo_path: A kernel repository (with `build/torch-tpu` in it), its `build` folder, or the variant
            folder itself. Where the metadata lists digests, the files are checked against them.

    Raises:
        KernelNotFoundError: There is no built kernel.
        IncompatibleKernelError: It does not run with what is installed.
        InvalidMetadataError: Its metadata is malformed.
        VerificationError: Its files are not the ones its digests promise; nothing of it was run.

    Example:
        >>> import tpu_kernels
        >>> kernel = tpu_kernels.get_local_kernel("dist/ragged-dot")  # doctest: +SKIP
    """
    return _load(resolve_local(Path(repo_path))).module


def get_loaded_kernels() -> list[LoadedKernel]:
    """The kernels that are loaded in this process, in the order they were loaded.

    Example:
        >>> import tpu_kernels
        >>> [kernel.repo_id for kernel in tpu_kernels.get_loaded_kernels()]  # doctest: +SKIP
        ['tpu-kernels/ragged-dot']
    """
    return _loaded_kernels()


@functools.cache
def _load_reference(reference: Reference, sources: tuple[Source, ...]) -> LoadedKernel:
    # The cache is the receipt: a reference that was loaded is answered without a look at any file.
    return _load(_resolve(reference, sources).unwrap())
