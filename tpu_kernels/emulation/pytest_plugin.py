"""A pytest plugin: `TPU_KERNELS_EMULATE=1 pytest` runs the tests on an emulated TPU.

pytest loads this in every environment that has tpu-kernels, so without the variable it does nothing, and it
imports nothing large.
"""

from __future__ import annotations

import os

import pytest

from ..errors import EmulationError
from . import install, is_active


# Before any conftest, which may well import torch.
@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    if os.environ.get("TPU_KERNELS_EMULATE") != "1":
        return
    try:
        install()
    except EmulationError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_report_header() -> str | None:
    return "tpu: emulated" if is_active() else None
