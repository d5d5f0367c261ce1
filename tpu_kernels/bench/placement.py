"""Where a benchmark runs. Decided before torch is imported: later, no emulated device can be set up."""

from __future__ import annotations

import dataclasses
import os
import platform
from dataclasses import dataclass

from .. import device, emulation
from ..errors import DeviceError, EmulationError
from ..log import get_logger
from ..projection.plan import ONE_CHIP, ParallelPlan
from . import memory
from .results import DeviceChoice, Evidence


@dataclass(frozen=True)
class Placement:
    """A device to run on.

    Attributes:
        torch_device: What `Tensor.to` takes.
        evidence: What figures from it are worth.
        description: In words.
        plan: How it shares a model with the devices of other ranks.
    """

    torch_device: str
    evidence: Evidence
    description: str
    plan: ParallelPlan = ONE_CHIP

    def memory_bytes(self) -> int | None:
        """Bytes of memory that weights and cache of a rank can use; None if unknown."""
        if self.evidence != "measured":
            free = memory.host_bytes()
            return None if free is None else free // self.plan.chips
        from torch_tpu._internal.utils import hardware

        size: int | None = hardware.get_hbm_bytes_per_device()
        return size


def place(choice: DeviceChoice, plan: ParallelPlan = ONE_CHIP) -> Placement:
    """Readies the device that `choice` names in this process, a rank of `plan`.

    Example:
        >>> place("cpu").evidence
        'cpu'
    """
    if plan.chips == 1:
        return _place(choice)
    # Emulated devices cannot exchange anything.
    alone = "cpu" if choice == "auto" and device.current().kind != "tpu" else choice
    placement = _place(alone)
    return dataclasses.replace(
        placement, plan=plan, description=f"{placement.description}, {plan} over {plan.chips} ranks"
    )


def _place(choice: DeviceChoice) -> Placement:
    if choice == "cpu":
        return _cpu()
    if choice == "emulated":
        emulation.install()
    elif choice == "auto" and device.current().kind == "cpu":
        try:
            emulation.install()
        except EmulationError as error:
            get_logger().info("running on the CPU: %s", error)
    current = device.current()
    if choice == "tpu" and current.kind != "tpu":
        raise DeviceError(
            f"device tpu was asked for, but here is {current.describe()}; choose emulated or cpu"
        )
    if current.kind == "cpu":
        return _cpu()
    return Placement("tpu", "measured" if current.kind == "tpu" else "emulated", current.describe())


def _cpu() -> Placement:
    return Placement("cpu", "cpu", f"CPU ({platform.machine()}, {os.cpu_count()} cores)")
