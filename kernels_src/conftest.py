"""Tests of kernels: their JAX side runs wherever JAX does, without torch and without a build."""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path

# Before jax and libtpu are loaded: no TPU is here, and none is to be looked for on the network.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# Interpreted kernels are compiled once and run once.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


def _make_importable(package: Path) -> None:
    """Makes a kernel's JAX modules importable under its name, without its `__init__`, which needs torch."""
    module = types.ModuleType(package.name)
    module.__path__ = [str(package)]
    sys.modules.setdefault(package.name, module)


for _package in Path(__file__).parent.glob("*/torch-ext/*/__init__.py"):
    _make_importable(_package.parent)

# Pallas' interpreter asks for the properties of the chip that it simulates.
_tpu_info = importlib.import_module("jax._src.pallas.mosaic.tpu_info")
_tpu_info.registry["cpu"] = lambda: _tpu_info.get_tpu_info_for_chip(_tpu_info.ChipVersion.TPU_V6E, 1)
