"""The kernels of this repository, and a sample one, to be built as it is or after an edit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "kernels_src"
KERNELS = sorted(config.parent.name for config in SOURCES.glob("*/build.toml"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the sample kernel's source that the test may edit."""
    return Path(
        shutil.copytree(Path(__file__).parent / "sample-kernel", tmp_path / "kernels" / "sample-kernel")
    )


@pytest.fixture
def package(source: Path) -> Path:
    """The package in `source`."""
    return source / "torch-ext" / "sample_kernel"
