"""The kernel hub: finds a kernel, proves that it is the right one, and loads it.

Data flows through one module a stage, each of which knows only those before it::

    reference -> sources -> resolve -> verify -> load

Which sources there are and in which order they are asked is `configuration`'s to say: overrides (`sources`),
the shipped registry or any folder (`sources`), a bucket (`bucket`), the Hub (`hub_source`, on top of `client`
for requests, `cache` for what was fetched, `trust` for whom to believe).

Importing this package loads neither torch nor jax nor huggingface_hub.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

from ..errors import IncompatibleKernelError
from ..log import warn_once
from .configuration import configured_sources
from .explanation import Decision, Explanation
from .load import LoadedKernel, find_loaded
from .load import load as _load
from .load import loaded_kernels as _loaded_kernels
from .reference import Reference
from .resolve import resolve as _resolve
from .resolve import resolve_local
from .sources import Source, registry_root
from .trust import Trust

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


def get_kernel(
    repo_id: str,
    *,
    revision: str | None = None,
    version: int | None = None,
    backend: str | None = None,
    user_agent: str | Mapping[str, str] | None = None,
    trust_remote_code: bool | Iterable[str] = False,
    check_arch: bool = True,
    source: str | os.PathLike[str] | None = None,
) -> ModuleType:
    """Loads a kernel and returns its module.

    A call that is written for stock `kernels` works here as it is.

    Args:
        repo_id: The kernel's repository, `org/name`.
        revision: A branch, tag or commit to load instead of a version.
        version: The version to load; the newest one that runs here if neither this nor `revision` is given,
            with a warning that a pin is better.
        backend: `"tpu"`, which is also the default; other hardware is for stock `kernels`.
        user_agent: What requests to the Hub say about who asks.
        trust_remote_code: Whom to trust besides the organisations that the Hub calls trusted publishers and
            those that the user's allow-list names (`TPU_KERNELS_TRUST`, `TPU_KERNELS_TRUST_FILE`): True for
            everyone, or a list of organisations and repositories.
        check_arch: Whether to refuse a kernel that is made for other TPU generations than the one here.
        source: Where to look, and nowhere else: `local` (what `LOCAL_KERNELS` names), `registry` (what ships
            with this package), `hub`, or the folder or URL of a registry. Otherwise `TPU_KERNELS_SOURCES`
            says it, by default `local,registry,hub`.

    Raises:
        InvalidReferenceError: `repo_id`, `version` or `revision` is malformed.
        ConfigurationError: So is `source`, `trust_remote_code` or an environment variable.
        KernelNotFoundError: No source has the kernel, or not in that version.
        SourceUnavailableError: A source cannot be reached, no other one has the kernel, nor does the cache.
        UntrustedKernelError: Its publisher is not trusted.
        IncompatibleKernelError: It does not run with what is installed.
        InvalidMetadataError: Its metadata is malformed.
        VerificationError: Its files are not the ones its digests promise; nothing of it was run.

    Example:
        >>> import tpu_kernels
        >>> ragged_dot = tpu_kernels.get_kernel("tpu-kernels/ragged-dot", version=1)  # doctest: +SKIP
    """
    reference = Reference(repo_id, version, revision)
    if unsupported := _unsupported(reference, backend):
        raise unsupported
    trust = Trust.of(trust_remote_code)
    loaded = _load_reference(reference, configured_sources(source, trust, _agent(user_agent)), check_arch)
    if not reference.pinned:
        warn_once(
            f"{repo_id}: no version was asked for, so the newest is loaded, and that can change; "
            f"pin it: get_kernel({repo_id!r}, version={loaded.version})"
        )
    return loaded.module


def has_kernel(
    repo_id: str,
    *,
    revision: str | None = None,
    version: int | None = None,
    backend: str | None = None,
    trust_remote_code: bool | Iterable[str] = False,
    check_arch: bool = True,
    source: str | os.PathLike[str] | None = None,
) -> bool:
    """Whether `get_kernel` would find a build that it may run here. Its files are not verified.

    A missing kernel or version, one that does not run here or is not trusted, or a Hub that cannot be
    reached, is a False, not an error; `explain` says which. The arguments are those of `get_kernel`.

    Raises:
        InvalidReferenceError: `repo_id`, `version` or `revision` is malformed.
        ConfigurationError: So is `source`, `trust_remote_code` or an environment variable.

    Example:
        >>> import tpu_kernels
        >>> tpu_kernels.has_kernel("tpu-kernels/no-such-kernel", source="registry")
        False
    """
    explanation = explain(
        repo_id,
        revision=revision,
        version=version,
        backend=backend,
        trust_remote_code=trust_remote_code,
        check_arch=check_arch,
        source=source,
    )
    return explanation.build is not None


def explain(
    repo_id: str,
    *,
    revision: str | None = None,
    version: int | None = None,
    backend: str | None = None,
    trust_remote_code: bool | Iterable[str] = False,
    check_arch: bool = True,
    source: str | os.PathLike[str] | None = None,
) -> Explanation:
    """What `get_kernel` would load and why, or why it would not; nothing is loaded.

    Of a kernel on the Hub its `metadata.json` is fetched, once its publisher is trusted, and no other file.
    The arguments are those of `get_kernel`.

    Raises:
        InvalidReferenceError: `repo_id`, `version` or `revision` is malformed.
        ConfigurationError: So is `source`, `trust_remote_code` or an environment variable.

    Example:
        >>> import tpu_kernels
        >>> print(tpu_kernels.explain("tpu-kernels/ragged-dot"))  # doctest: +SKIP
        tpu-kernels/ragged-dot, newest version
          registry: tpu-kernels/ragged-dot v1: accepted: the newest version that runs here
          chosen: .../registry/tpu-kernels/ragged-dot/v1/build/torch-tpu
    """
    reference = Reference(repo_id, version, revision)
    if unsupported := _unsupported(reference, backend):
        return Explanation(reference, (), unsupported)
    sources = configured_sources(source, Trust.of(trust_remote_code))
    return _resolve(reference, sources, check_arch=check_arch)


def get_local_kernel(
    repo_path: str | os.PathLike[str],
    *,
    backend: str | None = None,
    trust_remote_code: bool | Iterable[str] = False,
    user_agent: str | Mapping[str, str] | None = None,
) -> ModuleType:
    """Loads a built kernel from a folder and returns its module.

    Args:
        repo_path: A kernel repository (with `build/torch-tpu` in it), its `build` folder, or the variant
            folder itself. Where the metadata lists digests, the files are checked against them.
        backend: `"tpu"`, which is also the default.
        trust_remote_code: Takes no effect, nor does `user_agent`: the user named the folder, and no request
            is sent. They are there for calls that are written for stock `kernels`.

    Raises:
        KernelNotFoundError: There is no built kernel.
        IncompatibleKernelError: It does not run with what is installed.
        InvalidMetadataError: Its metadata is malformed.
        VerificationError: Its files are not the ones its digests promise; nothing of it was run.

    Example:
        >>> import tpu_kernels
        >>> kernel = tpu_kernels.get_local_kernel("dist/ragged-dot")  # doctest: +SKIP
    """
    if backend not in _BACKENDS:
        raise _wrong_backend(str(repo_path), backend)
    sources = configured_sources(None, Trust.of(trust_remote_code), _agent(user_agent))
    return _load(resolve_local(Path(repo_path), sources)).module


def get_loaded_kernels() -> list[LoadedKernel]:
    """The kernels that are loaded in this process, in the order they were loaded.

    Example:
        >>> import tpu_kernels
        >>> [kernel.repo_id for kernel in tpu_kernels.get_loaded_kernels()]  # doctest: +SKIP
        ['tpu-kernels/ragged-dot']
    """
    return _loaded_kernels()


@functools.cache
def _load_reference(reference: Reference, sources: tuple[Source, ...], check_arch: bool) -> LoadedKernel:
    # The cache is the receipt: a reference that was loaded is answered without a look at any file.
    return _load(_resolve(reference, sources, check_arch=check_arch).unwrap())


_BACKENDS = (None, "tpu")


def _unsupported(reference: Reference, backend: str | None) -> IncompatibleKernelError | None:
    return None if backend in _BACKENDS else _wrong_backend(str(reference), backend)


def _wrong_backend(subject: str, backend: str | None) -> IncompatibleKernelError:
    return IncompatibleKernelError(
        f"{subject} was asked for with backend={backend!r}; this library loads builds for 'tpu' only, "
        "others are for the kernels package"
    )


def _agent(user_agent: str | Mapping[str, str] | None) -> str | None:
    if user_agent is None or isinstance(user_agent, str):
        return user_agent
    return "; ".join(f"{key}/{value}" for key, value in user_agent.items())
