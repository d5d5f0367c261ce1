from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache_folder(session_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is compiled once serves all tests here."""
    monkeypatch.setenv("TPU_KERNELS_CACHE", str(session_cache))
    return session_cache / "compile"
