import os

import pytest

# Without a TPU, libtpu would ask the network for one: for minutes, at the first backward() of a process.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")


@pytest.fixture(scope="session")
def device() -> str:
    """The device under test: a TPU, real or emulated, where this process has one, else the CPU."""
    from tpu_kernels.device import current

    return "cpu" if current().kind == "cpu" else "tpu"


@pytest.fixture(scope="session")
def backend(device: str) -> str:
    """What torch.compile compiles with for the device."""
    return "tpu" if device == "tpu" else "aot_eager"
