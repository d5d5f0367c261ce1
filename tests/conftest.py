import os

import pytest
from hypothesis import HealthCheck, settings

# Without a TPU, libtpu would ask the network for one: for minutes, at the first backward() of a process.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# Shared machines are slow at times, which says nothing about the code.
settings.register_profile(
    "tpu-kernels",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("tpu-kernels")


@pytest.fixture(scope="session")
def device() -> str:
    """The device under test: a TPU, real or emulated, where this process has one, else the CPU."""
    from tpu_kernels.device import current

    return "cpu" if current().kind == "cpu" else "tpu"


@pytest.fixture(scope="session")
def backend(device: str) -> str:
    """What torch.compile compiles with for the device."""
    return "tpu" if device == "tpu" else "aot_eager"
