"""What programs call: load a kernel, ask for it, explain what would be loaded."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

from ..errors import IncompatibleKernelError
from ..log import warn_once
from .configuration import configured_sources
from .explanation import Explanation
from .load import LoadedKernel, load, loaded_kernels
from .reference import Reference
from .resolve import resolve, resolve_local
from .sources import Source
from .trust import Trust
from .verify import verify


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
        source: Where to look, and nowhere else: `local` (what `LOCAL_KERNELS` names), `lock` (the lock of the
            project), `registry` (what ships with this package), `hub`, or the folder or URL of a registry.
            Otherwise `TPU_KERNELS_SOURCES` says it, by default `local,lock,registry,hub`.

    Raises:
        InvalidReferenceError: `repo_id`, `version` or `revision` is malformed.
        ConfigurationError: So is `source`, `trust_remote_code` or an environment variable.
        LockError: So is the lock of the project.
        KernelNotFoundError: No source has the kernel, or not in that version, or not the build that is locked.
        SourceUnavailableError: A source cannot be reached, no other one has the kernel, nor does the cache.
        UntrustedKernelError: Its publisher is not trusted.
        IncompatibleKernelError: It, or a kernel that it depends on, does not run here, or would replace an op
            that something else registered.
        InvalidMetadataError: Its metadata is malformed.
        VerificationError: Its files are not the ones its digests or the lock promise, or it is not signed as
            `TPU_KERNELS_SIGNERS` wants it; nothing of it was run.

    Example:
        >>> import tpu_kernels
        >>> ragged_dot = tpu_kernels.get_kernel("tpu-kernels/ragged-dot", version=1)  # doctest: +SKIP
    """
    reference = Reference(repo_id, version, revision)
    check_backend(str(reference), backend)
    trust = Trust.of(trust_remote_code)
    sources = configured_sources(source, trust, agent(user_agent))
    return _load_reference(reference, sources, check_arch).module


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
    try:
        check_backend(str(reference), backend)
    except IncompatibleKernelError as error:
        return Explanation(reference, (), error)
    sources = configured_sources(source, Trust.of(trust_remote_code))
    return resolve(reference, sources, check_arch=check_arch)


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
        trust_remote_code: Whom to trust for the kernels that this one depends on; the folder itself is
            trusted, since it was named.
        user_agent: What requests to the Hub for these say about who asks.

    Raises:
        KernelNotFoundError: There is no built kernel.
        IncompatibleKernelError: It does not run with what is installed.
        InvalidMetadataError: Its metadata is malformed.
        VerificationError: Its files are not the ones its digests promise; nothing of it was run.

    Example:
        >>> import tpu_kernels
        >>> kernel = tpu_kernels.get_local_kernel("dist/ragged-dot")  # doctest: +SKIP
    """
    check_backend(str(repo_path), backend)
    sources = configured_sources(None, Trust.of(trust_remote_code), agent(user_agent))
    return load(resolve_local(Path(repo_path), sources)).module


def install_kernel(
    repo_id: str,
    *,
    revision: str | None = None,
    version: int | None = None,
    backend: str | None = None,
    local_files_only: bool = False,
    user_agent: str | Mapping[str, str] | None = None,
    trust_remote_code: bool | Iterable[str] = False,
    source: str | os.PathLike[str] | None = None,
) -> Path:
    """Downloads a kernel and what it depends on, verifies all of it, and returns the folder of its build.

    Nothing of it is run. The other arguments and the errors are those of `get_kernel`.

    Args:
        local_files_only: Whether to take what is on this machine and send no request to the Hub.

    Example:
        >>> import tpu_kernels
        >>> tpu_kernels.install_kernel("acme/relu", version=1)  # doctest: +SKIP
        PosixPath('.../snapshots/5c1e.../build/torch-tpu')
    """
    reference = Reference(repo_id, version, revision)
    check_backend(str(reference), backend)
    sources = configured_sources(
        source, Trust.of(trust_remote_code), agent(user_agent), local_only=local_files_only
    )
    builds = resolve(reference, sources).unwrap().tree()
    return [verify(build).path for build in builds][-1]


def get_loaded_kernels() -> list[LoadedKernel]:
    """The kernels that are loaded in this process, in the order they were loaded.

    Example:
        >>> import tpu_kernels
        >>> [kernel.repo_id for kernel in tpu_kernels.get_loaded_kernels()]  # doctest: +SKIP
        ['tpu-kernels/ragged-dot']
    """
    return loaded_kernels()


@functools.cache
def _load_reference(reference: Reference, sources: tuple[Source, ...], check_arch: bool) -> LoadedKernel:
    # The cache is the receipt: a reference that was loaded is answered without a look at any file.
    build = resolve(reference, sources, check_arch=check_arch).unwrap()
    loaded = load(build)
    if not reference.pinned and build.source != "lock":
        warn_once(
            f"{reference.repo_id}: no version was asked for, so the newest is loaded, and that can change; "
            f"pin it: get_kernel({reference.repo_id!r}, version={loaded.version})"
        )
    return loaded


def check_backend(subject: str, backend: str | None) -> None:
    """Raises IncompatibleKernelError for a backend that is none of this library's."""
    if backend not in (None, "tpu"):
        raise IncompatibleKernelError(
            f"{subject} was asked for with backend={backend!r}; this library loads builds for 'tpu' only, "
            "others are for the kernels package"
        )


def agent(user_agent: str | Mapping[str, str] | None) -> str | None:
    """What a call says about who asks, as one string."""
    if user_agent is None or isinstance(user_agent, str):
        return user_agent
    return "; ".join(f"{key}/{value}" for key, value in user_agent.items())
