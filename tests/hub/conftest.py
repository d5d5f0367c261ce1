"""Kernels and registries built for one test, from the sample kernel of the authoring tests."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tpu_kernels import log
from tpu_kernels.authoring import build_registry
from tpu_kernels.hub import configuration
from tpu_kernels.testing import FakeHub

SAMPLE = Path(__file__).parents[1] / "authoring" / "sample-kernel"

REPO = "tpu-kernels/sample-kernel"

# Stock takes a process for a TPU's by this attribute, which torch_tpu does not set.
ON_A_TPU = """
import types
import torch
torch.backends.tpu = types.ModuleType("torch.backends.tpu")
"""

# KERNELS_CACHE would come before the cache in HF_HOME. Told not to track, stock 0.17.2 sends an empty user agent,
# which no HTTP client lets through.
DROPPED = ("KERNELS_CACHE", "HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK")

MakeSource = Callable[..., Path]
Publish = Callable[..., str]
UseRegistry = Callable[..., Path]
Serve = Callable[..., FakeHub]
RunPython = Callable[..., str]


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
def publish(tmp_path: Path) -> Publish:
    """Writes a kernel in the layout of stock `kernels`, as others publish them: metadata and one module."""

    def write(
        repo_id: str,
        code: str,
        *,
        version: int = 1,
        variants: Sequence[str] = ("torch-tpu",),
        depends: Mapping[str, int] | None = None,
        **metadata: object,
    ) -> str:
        name = repo_id.partition("/")[2]
        builds = tmp_path / "repositories" / repo_id / f"v{version}" / "build"
        kernel_id = (
            f"_{name.replace('-', '_')}_tpu_{hashlib.sha256(f'{builds}{code}'.encode()).hexdigest()[:8]}"
        )
        content = {
            "name": name,
            "id": kernel_id,
            "version": version,
            "license": "MIT",
            "python-depends": [],
            "backend": {"type": "tpu"},
            "kernel-depends": [{"repo-id": other, "version": at} for other, at in (depends or {}).items()],
            **metadata,
        }
        for variant in variants:
            folder = builds / variant
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "metadata.json").write_text(json.dumps(content))
            (folder / "__init__.py").write_text(f"VARIANT = {variant!r}\n{code}\n")
        return kernel_id

    return write


@pytest.fixture
def use_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UseRegistry:
    """Builds sources into a registry, one after the other, and makes it the only source of kernels."""

    def use(*sources: Path) -> Path:
        registry = tmp_path / "registry"
        for source in sources:
            build_registry(source.parent, registry)
        monkeypatch.setattr(configuration, "registry_root", lambda: registry)
        monkeypatch.setenv("TPU_KERNELS_SOURCES", "registry")
        return registry

    return use


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Builds sources, puts them on a Hub of this machine, and makes it the only source of kernels."""
    with contextlib.ExitStack() as stack:

        def start(*sources: Path, trusted: Iterable[str] = ("tpu-kernels",)) -> FakeHub:
            root = tmp_path / "repositories"
            for source in sources:
                build_registry(source.parent, root)
            server = stack.enter_context(FakeHub(root, trusted=trusted))
            monkeypatch.setenv("HF_ENDPOINT", server.url)
            monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "cache"))
            monkeypatch.setenv("NO_PROXY", "*")
            monkeypatch.setenv("TPU_KERNELS_SOURCES", "hub")
            monkeypatch.setenv("TPU_KERNELS_FRESH", "0")
            return server

        yield start


def environment_of(server: FakeHub, home: Path, **environment: str) -> dict[str, str]:
    """The environment of a process that loads from a Hub with a cache of its own."""
    inherited = {name: value for name, value in os.environ.items() if name not in DROPPED}
    return {**inherited, **server.environment(home), "TPU_KERNELS_FRESH": "0", **environment}


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Runs a script in a process of its own, with a Hub, and returns what it prints on both streams."""

    def run(script: str, server: FakeHub, **environment: str) -> str:
        process = subprocess.run(
            [sys.executable, "-B", "-c", script],
            env=environment_of(server, tmp_path / "home", **environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert process.returncode == 0, process.stdout
        return process.stdout

    return run


@pytest.fixture(scope="session")
def forking() -> Iterator[subprocess.Popen[str]]:
    """The process that the scripts for stock are forked from."""
    with subprocess.Popen(
        [sys.executable, "-B", "-W", "ignore", str(Path(__file__).with_name("forking.py")), "torch"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def run_stock(forking: subprocess.Popen[str], tmp_path: Path) -> RunPython:
    """Runs a script for stock `kernels` on what it takes for a TPU, with a cache of its own, as `run_python` does."""
    numbers = itertools.count()

    def run(script: str, server: FakeHub, **environment: str) -> str:
        output = tmp_path / f"printed-{next(numbers)}"
        job = {
            "script": ON_A_TPU + script,
            "environment": environment_of(server, tmp_path / "stock", **environment),
            "output": str(output),
        }
        assert forking.stdin is not None
        assert forking.stdout is not None
        forking.stdin.write(json.dumps(job) + "\n")
        forking.stdin.flush()
        assert forking.stdout.readline() == "0\n", output.read_text()
        return output.read_text()

    return run


@pytest.fixture(autouse=True)
def warn_again() -> Iterator[None]:
    """Warnings that come once a process come once a test."""
    log.warn_once.cache_clear()
    yield
    log.warn_once.cache_clear()
