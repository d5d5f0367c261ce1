"""Kernels and registries built for one test, from the sample kernel of the authoring tests."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tpu_kernels import hub, log
from tpu_kernels.authoring import build_registry
from tpu_kernels.hub.sources import RegistrySource

SAMPLE = Path(__file__).parents[1] / "authoring" / "sample-kernel"

MakeSource = Callable[..., Path]
UseRegistry = Callable[..., Path]


@pytest.fixture
def make_source(tmp_path: Path) -> MakeSource:
    """Makes a kernel source: the sample kernel in a version, with code appended to its `__init__.py`."""
    numbers = itertools.count()

    def make(code: str = "", *, version: int = 1, edit: tuple[str, str] = ("", "")) -> Path:
        source = Path(shutil.copytree(SAMPLE, tmp_path / f"sources-{next(numbers)}" / "sample-kernel"))
        config = source / "build.toml"
        config.write_text(config.read_text().replace("version = 1", f"version = {version}").replace(*edit))
        init = source / "torch-ext" / "sample_kernel" / "__init__.py"
        # A loaded kernel stays loaded, so each test needs builds of its own: their content tells them apart.
        init.write_text(f"{init.read_text()}\nTEST = {str(source)!r}\nVERSION = {version}\n{code}\n")
        return source

    return make


@pytest.fixture
def use_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UseRegistry:
    """Builds sources into a registry, one after the other, and makes it the only source of kernels."""

    def use(*sources: Path) -> Path:
        registry = tmp_path / "registry"
        for source in sources:
            build_registry(source.parent, registry)
        monkeypatch.setattr(hub, "default_sources", lambda: (RegistrySource(registry),))
        return registry

    return use


@pytest.fixture(autouse=True)
def warn_again() -> Iterator[None]:
    """Warnings that come once a process come once a test."""
    log.warn_once.cache_clear()
    yield
    log.warn_once.cache_clear()
