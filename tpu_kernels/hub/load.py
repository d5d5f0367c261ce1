"""Loading: a verified build as a Python module under its own id.

A kernel's modules are imported from the sources that were verified, never from bytecode on disk, and its other
files are read as they were verified. Each
build lives under its own module name, so that versions do not meet; a build that is loaded stays loaded
and costs nothing to ask for again.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import sys
import threading
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.resources.abc import TraversableResources
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

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
    """Compiles a module from its verified source, and reads a kernel's other files as they were verified.

    Bytecode on disk is neither read nor written.
    """

    def __init__(self, fullname: str, build: VerifiedBuild, relative: str) -> None:
        super().__init__(fullname, str(build.path / relative))
        self._build = build
        self._relative = relative

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._build.contents[self._relative], self.path)

    def get_data(self, path: str) -> bytes:
        """What `pkgutil.get_data` reads."""
        try:
            return self._build.contents[Path(path).relative_to(self._build.path).as_posix()]
        except (KeyError, ValueError):
            raise FileNotFoundError(f"the kernel in {self._build.path} has no file {path}") from None

    def get_resource_reader(self, name: str | None = None) -> TraversableResources:  # type: ignore[override]
        """What `importlib.resources` reads."""
        return _VerifiedResources(self._build, self._relative.rpartition("/")[0])


class _VerifiedResources(TraversableResources):
    """The files of a kernel in one of its folders, as they were verified."""

    def __init__(self, build: VerifiedBuild, folder: str) -> None:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for path, content in build.contents.items():
                archive.writestr(path, content)
        self._files = zipfile.Path(zipfile.ZipFile(buffer), f"{folder}/" if folder else "")

    def files(self) -> Any:
        return self._files


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
        if init in build.contents:
            return _spec(fullname, build, init)
        if f"{folder}.py" in build.contents:
            return _spec(fullname, build, f"{folder}.py")
        if any(path.startswith(f"{folder}/") and path.endswith(".py") for path in build.contents):
            namespace = ModuleSpec(fullname, None, is_package=True)
            namespace.submodule_search_locations = [str(build.path / folder)]
            return namespace
        # Other finders would look in the kernel's folder, where unverified files may lie.
        raise ModuleNotFoundError(f"the kernel has no module {fullname!r}", name=fullname)


def _spec(fullname: str, build: VerifiedBuild, relative: str) -> ModuleSpec | None:
    loader = _VerifiedLoader(fullname, build, relative)
    return importlib.util.spec_from_file_location(fullname, loader.path, loader=loader)


_finder = _KernelFinder()
