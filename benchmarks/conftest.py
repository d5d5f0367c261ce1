"""Benchmarks run on the device that is there. Without a TPU: TPU_KERNELS_EMULATE=1 pytest benchmarks."""

import pytest
import torch

from tpu_kernels.device import current

collect_ignore = ["bench_experts.py"]  # a command


def pytest_report_header() -> str:
    return f"benchmarks on: {current().describe()}"


@pytest.fixture(scope="session", autouse=True)
def device() -> str:
    if current().kind == "cpu":
        pytest.skip("NOT RUN: no TPU, real or emulated; set TPU_KERNELS_EMULATE=1")
    torch.manual_seed(0)
    return "tpu"
