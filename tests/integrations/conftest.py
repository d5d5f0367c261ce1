from pathlib import Path

import pytest
import torch

import tpu_kernels
from tpu_kernels.bench import presets


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.device)


@pytest.fixture(autouse=True)
def _undo():
    yield
    tpu_kernels.disable()
    # Models share the code that generate compiles: one that reaches the recompile limit ends it for all.
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A family's small model, saved once."""
    built: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in built:
            built[family] = presets.build(family, tmp_path_factory.mktemp("models") / family)
        return built[family]

    return get
