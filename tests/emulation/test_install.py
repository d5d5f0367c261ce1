"""`emulation.install`: what it makes work, and where it refuses."""

from __future__ import annotations

import platform
import types
from pathlib import Path

import pytest

from tpu_kernels import device, emulation
from tpu_kernels.errors import EmulationError

from .conftest import Run

PROGRAM = """
import os
from tpu_kernels import device, emulation

library = os.environ.get("TPU_LIBRARY_PATH")
emulation.install()
emulation.install()  # a second time changes nothing
import torch

x = torch.arange(40, dtype=torch.float32, device="tpu").reshape(4, 10).requires_grad_()

def loss(x):
    return (x.topk(2).values ** 2).sum()

assert loss(x.detach()).item() == 9**2 + 8**2 + 19**2 + 18**2 + 29**2 + 28**2 + 39**2 + 38**2
for function in (loss, torch.compile(loss, backend="tpu", fullgraph=True)):
    (gradient,) = torch.autograd.grad(function(x), x)
    assert gradient[0].tolist() == [0] * 8 + [16, 18], gradient

assert torch.accelerator.is_available()
assert hasattr(torch.backends, "tpu")
assert device.current() == device.Device("emulated", None, chips=1)

import jax

assert jax.devices()[0].platform == "cpu"
assert os.environ.get("TPU_LIBRARY_PATH") == library  # by which JAX finds libtpu
"""


def test_install_gives_a_device_and_no_noise(run_python: Run) -> None:
    result = run_python("-c", PROGRAM)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_debug_log_shows_what_starts(run_python: Run) -> None:
    program = "from tpu_kernels import emulation; emulation.install()"
    result = run_python("-c", program, TPU_KERNELS_LOG="debug")
    assert result.returncode == 0
    for part in ("tcmalloc is not loaded", "GetPjrtApi was found", "Registered Python module"):
        assert part in result.stderr


def test_refuses_after_torch(run_python: Run) -> None:
    program = "import torch; from tpu_kernels import emulation; emulation.install()"
    result = run_python("-c", program)
    assert "EmulationError: torch is imported already" in result.stderr
    assert "before the first `import torch`" in result.stderr


@pytest.mark.parametrize(
    ("preparation", "plugin", "message"),
    [
        ("sys.modules['lammps_jax_pjrt_cpu'] = None", "", "pip install 'tpu-kernels[emulation]'"),
        ("sys.modules['torch_tpu'] = None", "", "pip install torch-tpu"),
        ("", "'absent.so'", "There is no PJRT plugin at"),
        ("pathlib.Path('text.so').write_text('text')", "'text.so'", "text.so is not a PJRT plugin"),
        ("pjrt._OLDEST_API = (9, 0)", "", "of the PJRT API; torch_tpu needs 9.0 or newer"),
    ],
)
def test_refuses_what_is_missing(run_python: Run, preparation: str, plugin: str, message: str) -> None:
    result = run_python(
        "-c",
        "import pathlib, sys; from tpu_kernels import emulation; from tpu_kernels.emulation import pjrt\n"
        f"{preparation}\nemulation.install({plugin})",
    )
    assert "EmulationError: " in result.stderr
    assert message in result.stderr


def test_refuses_beside_a_real_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = types.SimpleNamespace(get_tpu_device_count=lambda: 4, get_tpu_device_name=lambda: "TPU v6e")
    monkeypatch.setattr(device, "_pci_bus", lambda: bus)
    monkeypatch.setattr(emulation, "_active", False)
    with pytest.raises(EmulationError, match=r"has a real TPU \(TPU v6e, 4 chips\)"):
        emulation.install()


def test_refuses_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(emulation, "_active", False)
    with pytest.raises(EmulationError, match="needs Linux on x86-64; this is linux on aarch64"):
        emulation.install(Path("any.so"))
