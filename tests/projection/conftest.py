from pathlib import Path

import pytest


@pytest.fixture(scope="package", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_KERNELS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def configs() -> Path:
    """Folders with the config.json of real models."""
    return Path(__file__).parent
