"""Loading: a verified build as a Python module under its own id.

A kernel's modules are imported from the sources that were verified, never from bytecode on disk. Each
build lives under its own module name, so that versions do not meet; a build that is loaded stays loaded
and costs nothing to ask for again.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from ..errors import IncompatibleKernelError
from .metadata import Metadata
from .resolve import ResolvedBuild
from .verify import VerifiedBuild, verify


@dataclass(frozen=True, eq=False)
class LoadedKernel:
    """A kernel that is loaded in this process. `repo_id` is None for one that was named by its folder.

    `path` is its variant folder on this machine, `address` where that came from.
    """

    repo_id: str | None
    version: int
    id: str
    path: Path
    metadata: Metadata
    module: ModuleType
    address: str


_loaded: dict[str, LoadedKernel] = {}
_locks: dict[str, threading.RLock] = {}


def load(build: ResolvedBuild) -> LoadedKernel:
    """Verifies and imports `build`, or returns it as it is if it is loaded already.

    Raises:
        VerificationError: A file is not the one its digest promises; nothing was run.
        IncompatibleKernelError: Its module id is taken by something else.
        SourceUnavailableError: Its files are not here and cannot be fetched.
    """
    kernel_id = build.metadata.id
    # One lock a build: kernels load side by side, and the same kernel loads once.
    with _locks.setdefault(kernel_id, threading.RLock()):
        loaded = _loaded.get(kernel_id)
        if loaded is None:
            _check_free(kernel_id)
            loaded = _loaded[kernel_id] = _import(verify(build))
        elif not _same_build(loaded, build):
            raise IncompatibleKernelError(
                f"the kernel in {build.address} has the id {kernel_id!r} of another loaded kernel, the one in "
                f"{loaded.address}; no two builds may share an id, "
                "build it again with: tpu-kernels build SOURCE --out DIR"
            )
        return loaded


def loaded_kernels() -> list[LoadedKernel]:
    """The kernels that are loaded in this process, in the order they were loaded."""
    return list(_loaded.values())


def find_loaded(module: ModuleType) -> LoadedKernel | None:
    """The record of a kernel module, None if `module` was not loaded by this library."""
    loaded = _loaded.get(module.__name__)
    return loaded if loaded is not None and loaded.module is module else None


def _same_build(loaded: LoadedKernel, build: ResolvedBuild) -> bool:
    # Equal metadata with digests means equal files; without digests only the place tells builds apart.
    same_files = build.metadata.digest is not None or loaded.address == build.address
    return same_files and loaded.metadata == build.metadata


def _check_free(kernel_id: str) -> None:
    if kernel_id in sys.modules or importlib.util.find_spec(kernel_id) is not None:
        raise IncompatibleKernelError(
            f"the kernel id {kernel_id!r} is the name of another module, imported or installed; "
            "load a kernel through one library only, and give each build an id of its own"
        )


def _import(build: VerifiedBuild) -> LoadedKernel:
    resolved = build.resolved
    metadata = resolved.metadata
    _finder.add(build)
    try:
        module = importlib.import_module(metadata.id)
    except BaseException as error:
        # The import system drops the module that failed, but not the submodules that had succeeded.
        _finder.remove(build)
        for name in list(sys.modules):
            if name.partition(".")[0] == metadata.id:
                del sys.modules[name]
        error.add_note(
            f"while importing kernel {metadata.name!r}, version {metadata.version}, from {build.path}"
        )
        raise
    return LoadedKernel(
        resolved.repo_id, metadata.version, metadata.id, build.path, metadata, module, resolved.address
    )


class _VerifiedLoader(SourceFileLoader):
    """Compiles a module from its verified source; bytecode on disk is neither read nor written."""

    def __init__(self, fullname: str, path: str, source: bytes) -> None:
        super().__init__(fullname, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._source, self.path)

    def get_data(self, path: str) -> bytes:
        return self._source if path == self.path else super().get_data(path)


class _KernelFinder(MetaPathFinder):
    """Finds the modules of kernels among their verified sources, and nowhere else."""

    def __init__(self) -> None:
        self._builds: dict[str, VerifiedBuild] = {}

    def add(self, build: VerifiedBuild) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self._builds[build.resolved.metadata.id] = build

    def remove(self, build: VerifiedBuild) -> None:
        del self._builds[build.resolved.metadata.id]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        kernel_id, *parts = fullname.split(".")
        build = self._builds.get(kernel_id)
        if build is None:
            return None
        folder = "/".join(parts)
        init = f"{folder}/__init__.py" if folder else "__init__.py"
        if init in build.sources:
            return _spec(fullname, build, init)
        if f"{folder}.py" in build.sources:
            return _spec(fullname, build, f"{folder}.py")
        if any(source.startswith(f"{folder}/") for source in build.sources):
            namespace = ModuleSpec(fullname, None, is_package=True)
            namespace.submodule_search_locations = [str(build.path / folder)]
            return namespace
        # Other finders would look in the kernel's folder, where unverified files may lie.
        raise ModuleNotFoundError(f"the kernel has no module {fullname!r}", name=fullname)


def _spec(fullname: str, build: VerifiedBuild, relative: str) -> ModuleSpec | None:
    path = str(build.path / relative)
    loader = _VerifiedLoader(fullname, path, build.sources[relative])
    return importlib.util.spec_from_file_location(fullname, path, loader=loader)


_finder = _KernelFinder()
