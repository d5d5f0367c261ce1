"""Tests of kernels: their JAX side runs wherever JAX does, without torch and without a build."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tomllib
from pathlib import Path

# Before jax and libtpu are loaded: no TPU is here, and none is to be looked for on the network.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# Interpreted kernels are compiled once and run once.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


def _package(source: Path) -> Path:
    return source / "torch-ext" / source.name.replace("-", "_")


def _make_importable(package: Path, name: str) -> None:
    """Makes a kernel's JAX modules importable under `name`, without its `__init__`, which needs torch."""
    spec = importlib.util.spec_from_file_location(
        name, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    sys.modules.setdefault(name, importlib.util.module_from_spec(spec))


# As built: each kernel under its own name, and inside it the op layer and the kernels that it includes.
SOURCES = Path(__file__).resolve().parent
OPS = SOURCES.parent / "tpu_kernels" / "ops"
for _config in SOURCES.glob("*/build.toml"):
    _kernel = _package(_config.parent)
    _make_importable(_kernel, _kernel.name)
    _make_importable(OPS, f"{_kernel.name}.tpu_ops")
    for _included in tomllib.loads(_config.read_text())["tpu"].get("include", []):
        _inner = _package(_config.parent.parent / _included)
        _make_importable(_inner, f"{_kernel.name}.{_inner.name}")
        _make_importable(OPS, f"{_kernel.name}.{_inner.name}.tpu_ops")

# Pallas' interpreter asks for the properties of the chip that it simulates.
_tpu_info = importlib.import_module("jax._src.pallas.mosaic.tpu_info")
_tpu_info.registry["cpu"] = lambda: _tpu_info.get_tpu_info_for_chip(_tpu_info.ChipVersion.TPU_V6E, 1)
