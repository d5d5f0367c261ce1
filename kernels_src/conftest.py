"""Tests of kernels: their JAX side runs wherever JAX does, without torch and without a build."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

# Before jax and libtpu are loaded: no TPU is here, and none is to be looked for on the network.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# Interpreted kernels are compiled once and run once.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


def _make_importable(name: str, package: Path) -> None:
    """Makes the modules of a package importable under `name`, without its `__init__`, which needs torch."""
    spec = importlib.util.spec_from_file_location(
        name, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    sys.modules.setdefault(name, importlib.util.module_from_spec(spec))


OPS = Path(__file__).parents[1] / "tpu_kernels" / "ops"
for _init in Path(__file__).parent.glob("*/torch-ext/*/__init__.py"):
    _make_importable(_init.parent.name, _init.parent)
    # The build puts a copy of it there.
    _make_importable(f"{_init.parent.name}.tpu_ops", OPS)

# Pallas' interpreter asks for the properties of the chip that it simulates.
_tpu_info = importlib.import_module("jax._src.pallas.mosaic.tpu_info")
_tpu_info.registry["cpu"] = lambda: _tpu_info.get_tpu_info_for_chip(_tpu_info.ChipVersion.TPU_V6E, 1)
