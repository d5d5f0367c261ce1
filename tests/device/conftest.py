import sys

import pytest
import torch

import tpu_kernels


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(__file__.removesuffix("conftest.py")):
            item.add_marker(pytest.mark.device)


@pytest.fixture(scope="session")
def kernel():
    return tpu_kernels.get_kernel("kernels-community/ragged-dot", version=1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def relative_l2(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    assert actual.shape == expected.shape
    return ((actual - expected).norm() / expected.norm().clamp(min=sys.float_info.min)).item()
