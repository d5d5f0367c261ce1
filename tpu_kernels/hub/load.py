"""Loading: a verified build as a Python module under its own id.

A kernel's modules are imported from the sources that were verified, never from bytecode on disk, and its other
files are read as they were verified. Each
build lives under its own module name, so that versions do not meet; a build that is loaded stays loaded
and costs nothing to ask for again.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import sys
import threading
import zipfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.resources.abc import TraversableResources
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ..errors import IncompatibleKernelError
from .explanation import ResolvedBuild
from .metadata import Metadata
from .registrations import watched
from .verify import VerifiedBuild, verify


@dataclass(frozen=True)
class RepoInfo:
    """Where a kernel comes from: its repository, and the commit or version branch there."""

    repo_id: str
    revision: str


@dataclass(frozen=True, eq=False)
class LoadedKernel:
    """A kernel that is loaded in this process. `repo_id` is None for one that was named by its folder.

    `path` is its variant folder on this machine, `address` where that came from. `metadata`, `module` and
    `repo_info` are there in stock `kernels` too.
    """

    repo_id: str | None
    version: int
    id: str
    path: Path
    metadata: Metadata
    module: ModuleType
    address: str
    repo_info: RepoInfo | None = None


_loaded: dict[str, LoadedKernel] = {}
_locks: dict[str, threading.RLock] = {}


def load(build: ResolvedBuild) -> LoadedKernel:
    """Verifies and imports `build` and what it depends on, or returns it as it is if it is loaded already.

    All of them are verified before any of them is imported.

    Raises:
        VerificationError: A file is not the one its digest promises; nothing was run.
        IncompatibleKernelError: A module id or the name of an op is taken by something else.
        SourceUnavailableError: Files are not here and cannot be fetched.
    """
    tree = build.tree()
    with contextlib.ExitStack() as stack:
        # One lock a build: kernels load side by side, and the same kernel loads once. All threads take them in
        # the same order, so that none waits for another that waits for it.
        for kernel_id in sorted({part.metadata.id for part in tree}):
            stack.enter_context(_locks.setdefault(kernel_id, threading.RLock()))
        pending: dict[str, VerifiedBuild] = {}
        for part in tree:
            kernel_id = part.metadata.id
            if kernel_id in _loaded:
                _check_same(part, _loaded[kernel_id])
            elif kernel_id in pending:
                _check_same(part, pending[kernel_id].resolved)
            else:
                _check_free(kernel_id)
                pending[kernel_id] = verify(part)
        for kernel_id, verified in pending.items():
            _loaded[kernel_id] = _import(verified)
        return _loaded[build.metadata.id]


def loaded_kernels() -> list[LoadedKernel]:
    """The kernels that are loaded in this process, in the order they were loaded."""
    return list(_loaded.values())


def find_loaded(module: ModuleType) -> LoadedKernel | None:
    """The record of a kernel module, None if `module` was not loaded by this library."""
    loaded = _loaded.get(module.__name__)
    return loaded if loaded is not None and loaded.module is module else None


def _check_same(build: ResolvedBuild, other: LoadedKernel | ResolvedBuild) -> None:
    # Equal metadata with digests means equal files; without digests only the place tells builds apart.
    same_files = build.metadata.digest is not None or build.address == other.address
    if not same_files or build.metadata != other.metadata:
        raise IncompatibleKernelError(
            f"the kernel in {build.address} has the id {build.metadata.id!r} of another kernel, the one in "
            f"{other.address}; no two builds may share an id, "
            "build it again with: tpu-kernels build SOURCE --out DIR"
        )


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
    modules = {repo_id: _loaded[part.metadata.id].module for repo_id, part in resolved.dependencies.items()}
    try:
        with _dependencies(modules), watched(metadata.id):
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
    info = RepoInfo(resolved.repo_id, resolved.revision) if resolved.repo_id is not None else None
    return LoadedKernel(
        resolved.repo_id,
        metadata.version,
        metadata.id,
        build.path,
        metadata,
        module,
        resolved.address,
        info,
    )


def _dependencies(modules: dict[str, ModuleType]) -> AbstractContextManager[None]:
    """Lets a kernel reach those it depends on, by `kernels.get_kernel_dep`, while it is imported."""
    if not modules and "kernels" not in sys.modules:
        return contextlib.nullcontext()
    from kernels.deps import use_kernel_deps

    manager: AbstractContextManager[None] = use_kernel_deps(modules)
    return manager


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
