"""Which device there is, on machines that are made up of files; and keeping JAX off it."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from tpu_kernels import device, emulation
from tpu_kernels.device import Device
from tpu_kernels.errors import DeviceError

Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes this machine one with the given PCI devices; those with vfio can be opened through it."""

    def rooted(path: str) -> Path:
        return tmp_path / path.lstrip("/")

    monkeypatch.setattr(emulation, "_active", False)
    bus = device._pci_bus()
    assert bus is not None
    monkeypatch.setattr(bus, "pathlib", types.SimpleNamespace(Path=rooted))
    monkeypatch.setattr(device, "Path", rooted)
    rooted("/dev/vfio").mkdir(parents=True)

    def make(*pci_ids: tuple[str, str], vfio: bool = True) -> None:
        for i, (vendor, kind) in enumerate(pci_ids):
            function = rooted(f"/sys/bus/pci/devices/0000:00:0{i}.0")
            function.mkdir(parents=True)
            function.joinpath("vendor").write_text(vendor + "\n")
            function.joinpath("device").write_text(kind + "\n")
            function.joinpath("iommu_group").symlink_to(f"/sys/kernel/iommu_groups/{i}")
            rooted(f"/dev/vfio/{i}" if vfio else f"/dev/accel{i}").touch()

    return make


V4, V6E, NETWORK_CARD = ("0x1ae0", "0x005e"), ("0x1ae0", "0x006f"), ("0x1af4", "0x1000")


def test_no_tpu(machine: Machine) -> None:
    machine(NETWORK_CARD, NETWORK_CARD)
    assert device.current() == Device("cpu", None, chips=0)
    assert device.current().describe() == "no TPU"


def test_chips_behind_vfio(machine: Machine) -> None:
    machine(NETWORK_CARD, V6E, V6E)
    assert device.current() == Device("tpu", "v6e", chips=2)
    assert device.current().describe() == "TPU v6e, 2 chips"


def test_chips_behind_the_older_driver(machine: Machine) -> None:
    machine(V4, vfio=False)
    assert device.current() == Device("tpu", "v4", chips=1)
    assert device.current().describe() == "TPU v4, 1 chip"


@pytest.mark.parametrize(
    ("name", "generation"),
    [("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e"), ("TPU7x", "tpu7x"), ("TPU v9", None)],
)
def test_names_of_generations(name: str, generation: device.Generation | None) -> None:
    assert device.generation_of(name) == generation


def test_descriptions() -> None:
    assert Device("tpu", "tpu7x", chips=4).describe() == "TPU7x, 4 chips"
    assert Device("tpu", None, chips=4).describe() == "TPU of an unknown generation, 4 chips"
    assert Device("emulated", None, chips=1).describe() == "emulated TPU, on the CPU"


def test_asking_loads_nothing() -> None:
    program = "import sys; from tpu_kernels import device; device.current(); device.keep_jax_off_tpu()"
    heavy = "{'torch', 'torch_tpu', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"{program}\nassert not {heavy}"], check=True, timeout=60)


@pytest.mark.parametrize(
    "first", ["import jax", "from tpu_kernels import device"], ids=["jax", "tpu_kernels"]
)
def test_jax_is_kept_on_the_cpu(first: str) -> None:
    program = (
        f"{first}\nfrom tpu_kernels import device; device.keep_jax_off_tpu()\n"
        "import jax; assert jax.config.jax_platforms == 'cpu', jax.config.jax_platforms\n"
        "assert jax.devices()[0].platform == 'cpu'\n"
        "device.keep_jax_off_tpu()  # with a backend that may stay"
    )
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)


def test_says_that_jax_has_the_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    from jax._src import xla_bridge

    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: True)
    monkeypatch.setattr(xla_bridge, "backends", lambda: {"cpu": object(), "tpu": object()})
    with pytest.raises(DeviceError, match="JAX has opened the TPU in this process"):
        device.keep_jax_off_tpu()
