from __future__ import annotations

import shutil
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "kernels_src" / "ragged-dot"


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache(session_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is computed once serves all tests here."""
    monkeypatch.setenv("TPU_KERNELS_CACHE", str(session_cache))
    return session_cache


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of ragged-dot's source without its tables."""
    ignored = shutil.ignore_patterns("tuned", "tests", "__pycache__")
    return Path(shutil.copytree(SOURCE, tmp_path / "kernels" / "ragged-dot", ignore=ignored))
