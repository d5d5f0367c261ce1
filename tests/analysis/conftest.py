from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="NOT RUN: libtpu is not installed"
)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache for this test alone."""
    monkeypatch.setenv("TPU_KERNELS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "compile"
