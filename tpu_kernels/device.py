"""Which TPU this process has, and keeping JAX off it.

Nothing here starts a TPU runtime: the chips are found on the PCI bus, so asking is safe beside a program that
holds them, and costs no import of torch or JAX.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from .errors import DeviceError

Kind = Literal["tpu", "emulated", "cpu"]
Generation = Literal["v4", "v5e", "v5p", "v6e", "tpu7x"]

# The same chips as torch_tpu names them after the PCI bus, and as libtpu and so JAX do (`device_kind`).
_GENERATIONS: dict[str, Generation] = {
    "TPU v4": "v4",
    "TPU v5e": "v5e",
    "TPU v5 lite": "v5e",
    "TPU v5p": "v5p",
    "TPU v5": "v5p",
    "TPU v6e": "v6e",
    "TPU v6 lite": "v6e",
    "TPU v7": "tpu7x",
    "TPU7x": "tpu7x",
}


@dataclass(frozen=True)
class Device:
    """What `torch.device("tpu")` means in this process.

    Attributes:
        kind: A real TPU, the emulated one, or none.
        generation: Of a real TPU; None if it is none of those known here.
        chips: How many there are.

    Example:
        >>> Device("tpu", "v6e", chips=4).kind
        'tpu'
    """

    kind: Kind
    generation: Generation | None
    chips: int

    def describe(self) -> str:
        """One phrase for people.

        Example:
            >>> Device("tpu", "v6e", chips=4).describe()
            'TPU v6e, 4 chips'
        """
        if self.kind == "cpu":
            return "no TPU"
        if self.kind == "emulated":
            return "emulated TPU, on the CPU"
        names = {None: "TPU of an unknown generation", "tpu7x": "TPU7x"}
        name = names.get(self.generation, f"TPU {self.generation}")
        return f"{name}, {self.chips} chip{'s' if self.chips > 1 else ''}"


def current() -> Device:
    """The device of this process: the emulated TPU if that is installed, else the chips of this machine.

    Example:
        >>> current()  # doctest: +SKIP
        Device(kind='tpu', generation='v6e', chips=4)
    """
    from .emulation import is_active

    if is_active():
        return Device("emulated", None, chips=1)
    bus = _pci_bus()
    chips = attached_chips()
    if bus is None or not chips:
        return Device("cpu", None, chips=0)
    return Device("tpu", generation_of(bus.get_tpu_device_name()), chips)


def generation_of(device_kind: str) -> Generation | None:
    """The generation of the chip that libtpu, JAX or torch_tpu calls `device_kind`, None for an unknown one.

    Example:
        >>> generation_of("TPU v5 lite")
        'v5e'
    """
    return _GENERATIONS.get(device_kind)


def attached_chips() -> int:
    """How many TPU chips this process could open. An emulated one does not count.

    Example:
        >>> attached_chips()  # doctest: +SKIP
        4
    """
    bus = _pci_bus()
    if bus is None:
        return 0
    chips: int = bus.get_tpu_device_count()
    if not chips and generation_of(bus.get_tpu_device_name()):
        # torch_tpu counts what vfio hands out. Older TPU machines have a driver of their own in its place.
        chips = len(list(Path("/dev").glob("accel[0-9]*")))
    return chips


@functools.cache
def _pci_bus() -> ModuleType | None:
    """torch_tpu's scan of the PCI bus, None without torch_tpu.

    It is loaded from its file. Importing it by its name would import torch and so settle which library drives
    the device, and the emulation changes the module of that name.
    """
    package = importlib.util.find_spec("torch_tpu")
    if package is None or not package.submodule_search_locations:
        return None
    file = Path(package.submodule_search_locations[0], "_internal", "utils", "hardware.py")
    spec = importlib.util.spec_from_file_location("tpu_kernels._torch_tpu_hardware", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def keep_jax_off_tpu() -> None:
    """Confines JAX to the CPU in this process, so that it does not contend with torch for the chips.

    Unless told otherwise JAX starts a TPU client of its own on first use, and a chip serves one client only.
    Compiling for a TPU (`jax.export`, or lowering for a topology) needs no client and goes on working.

    Raises:
        DeviceError: JAX has opened the TPU already.

    Example:
        >>> keep_jax_off_tpu()
        >>> import jax
        >>> jax.devices()
        [CpuDevice(id=0)]
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" not in sys.modules:
        return
    import jax
    from jax._src import xla_bridge

    if not xla_bridge.backends_are_initialized():
        jax.config.update("jax_platforms", "cpu")
    elif "tpu" in xla_bridge.backends():
        raise DeviceError(
            "JAX has opened the TPU in this process, so torch cannot. Set JAX_PLATFORMS=cpu, or import "
            "tpu_kernels before JAX computes anything, or give the JAX part a process of its own."
        )
