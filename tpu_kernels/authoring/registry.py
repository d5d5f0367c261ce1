"""The registry: the built kernels that ship with this package, and their index."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

from ..errors import BuildError
from ..files import replace_folder
from ..hub.layout import dump_json, list_files
from ..hub.metadata import Metadata, parse_json
from ..hub.reference import Reference
from ..hub.sources import INDEX_FILE, RegistrySource
from ..hub.verify import verify_files
from .builder import BuiltKernel, assemble
from .project import CONFIG_FILE


def build_registry(sources: str | Path, registry: str | Path) -> list[BuiltKernel]:
    """Builds every kernel source in the folder `sources` into `registry`, with the index.

    A version that is in the registry and older than the one of the source is released, and is kept as it
    is. Everything else is built anew, and a kernel without a source is dropped.

    Raises:
        InvalidMetadataError: A `build.toml` or the index is malformed.
        BuildError: A source cannot be built, two of them claim one name, or `registry` is something else.
        VerificationError: A released version was changed.

    Example:
        >>> from tpu_kernels.authoring import build_registry
        >>> build_registry("kernels_src", "registry")  # doctest: +SKIP
    """
    registry = Path(registry)
    is_new = not registry.exists() or (registry.is_dir() and not any(registry.iterdir()))
    if not is_new and not (registry / INDEX_FILE).is_file():
        raise BuildError(f"{registry} is no registry, and building would replace it; give a new folder")
    kernels = _build_all(Path(sources))
    replace_folder(registry, registry_files(kernels, registry), BuildError)
    return kernels


def stale(sources: str | Path, registry: str | Path) -> list[str]:
    """How `registry` differs from what `build_registry` would make of it; empty when it is fresh.

    Example:
        >>> from tpu_kernels.authoring import stale
        >>> stale("kernels_src", "registry")  # doctest: +SKIP
        ['changed: tpu-kernels/ragged-dot/v1/build/torch-tpu/metadata.json']
    """
    registry = Path(registry)
    expected = registry_files(_build_all(Path(sources)), registry)
    listed = list_files(registry, BuildError) if registry.is_dir() else {}
    found = {path: file.read_bytes() for path, file in listed.items()}
    differences = []
    for path in sorted(expected.keys() | found.keys()):
        if path not in found:
            differences.append(f"missing: {path}")
        elif path not in expected:
            differences.append(f"left over: {path}")
        elif found[path] != expected[path]:
            differences.append(f"changed: {path}")
    return differences


def _build_all(sources: Path) -> list[BuiltKernel]:
    if not sources.is_dir():
        raise BuildError(f"{sources} is no folder of kernel sources")
    kernels = [assemble(config.parent) for config in sorted(sources.glob(f"*/{CONFIG_FILE}"))]
    names = Counter(name for kernel in kernels for name in (kernel.repo_id, *kernel.aliases))
    for name, count in names.items():
        if count > 1:
            raise BuildError(f"{sources}: {name!r} is a repo-id or alias twice; name one kernel by it")
    return kernels


def registry_files(kernels: list[BuiltKernel], released: Path | None = None) -> dict[str, bytes]:
    """The files of a registry of `kernels`, with their versions that another registry has `released`."""
    files: dict[str, bytes] = {}
    index: dict[str, dict[str, Any]] = {"aliases": {}, "kernels": {}}
    for kernel in kernels:
        index["aliases"].update(dict.fromkeys(kernel.aliases, kernel.repo_id))
        entries = index["kernels"][kernel.repo_id] = {}
        for build in (*_released(kernel, released), kernel):
            path = f"{build.repo_id}/v{build.metadata.version}"
            files.update({f"{path}/{relative}": content for relative, content in build.files.items()})
            sha256 = hashlib.sha256(build.metadata_file).hexdigest()
            entries[str(build.metadata.version)] = {"metadata-sha256": sha256, "path": path}
    files[INDEX_FILE] = dump_json(index)
    return files


def _released(kernel: BuiltKernel, registry: Path | None) -> list[BuiltKernel]:
    """The versions of `kernel` in `registry` before the current one."""
    if registry is None or not (registry / INDEX_FILE).is_file():
        return []
    source = RegistrySource(registry)
    released = []
    for version in source.versions(kernel.repo_id):
        if version < kernel.metadata.version:
            [candidate] = source.find(Reference(kernel.repo_id, version))
            metadata = parse_json(Metadata, source.read_metadata(candidate), candidate.location)
            verify_files(source.fetch(candidate), metadata)
            folder = registry / candidate.location
            files = {path: file.read_bytes() for path, file in list_files(folder, BuildError).items()}
            released.append(BuiltKernel(kernel.repo_id, (), metadata, files))
    return released
