"""One kernel, from the compiler's text to the time it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .blocks import Block, find_blocks
from .calibration import Calibration
from .executor import run
from .ir import Schedule
from .models import FifoDma, QueuedMatrix
from .parser import parse_bundles
from .replay import Timing, replay
from .trace import Trace
from .utilization import Utilization, parse_utilization


@dataclass(frozen=True)
class Kernel:
    """A kernel that can be run.

    Attributes:
        schedule: Its bundles.
        blocks: Its basic blocks.
        utilization: What its bundles use.
    """

    schedule: Schedule
    blocks: tuple[Block, ...]
    utilization: Utilization


@dataclass(frozen=True)
class KernelRun:
    """A kernel's run on given integers.

    Attributes:
        kernel: What ran.
        trace: What it did.
        timing: When.
    """

    kernel: Kernel
    trace: Trace
    timing: Timing

    @property
    def bundle_runs(self) -> np.ndarray:
        """How often each bundle was run: [bundles]."""
        blocks = self.kernel.blocks
        runs = np.bincount(np.frombuffer(self.trace.blocks, np.uint32), minlength=len(blocks))
        return np.repeat(runs, [block.end - block.start for block in blocks])


def load_kernel(bundles: str, utilization: str, calibration: Calibration) -> Kernel:
    """Reads the compiler's two texts on a kernel.

    Raises:
        SimulationError: They cannot be read or followed.
    """
    schedule = parse_bundles(bundles)
    return Kernel(
        schedule,
        find_blocks(schedule, calibration.delay_slots),
        parse_utilization(utilization, len(schedule.bundles)),
    )


def follow(
    kernel: Kernel,
    data: Mapping[int, Sequence[int]],
    copied: Sequence[Sequence[int] | None],
    names: Sequence[str],
    calibration: Calibration,
) -> Trace:
    """What a kernel does when its operands hold `data` and it copies `copied` to scalar memory; `names` are for
    messages.

    Raises:
        SimulationError: That cannot be told.
    """
    granule = calibration.memory.granule_bytes
    return run(kernel.schedule, kernel.blocks, data, copied, granule=granule, names=names)


def time(kernel: Kernel, trace: Trace, calibration: Calibration) -> KernelRun:
    """How long that takes.

    Raises:
        SimulationError: It takes for ever.
    """
    timing = replay(
        kernel.schedule,
        kernel.blocks,
        trace,
        dma=FifoDma(calibration),
        matrix=QueuedMatrix(calibration.matrix),
        granule=calibration.memory.granule_bytes,
    )
    return KernelRun(kernel, trace, timing)
