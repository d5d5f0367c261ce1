"""One kernel, from the compiler's text to the time it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .blocks import Block, find_blocks
from .calibration import Calibration
from .executor import asks_for_core, run
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
    """A core's run of a kernel on given integers.

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
) -> list[Trace]:
    """What a kernel does when its operands hold `data` and it copies `copied` to scalar memory, on each of the cores
    that work on it; `names` are for messages.

    Raises:
        SimulationError: That cannot be told.
    """
    granule = calibration.memory.granule_bytes
    cores = calibration.cores if asks_for_core(kernel.schedule) else 1
    traces = [
        run(kernel.schedule, kernel.blocks, data, copied, granule=granule, names=names, core=core)
        for core in range(cores)
    ]
    # What a kernel does not divide is done by the first core, while the others wait for it.
    return [
        traces[0],
        *(trace for trace in traces[1:] if any(event.action == "dma" for event in trace.events)),
    ]


def time(kernel: Kernel, traces: Sequence[Trace], calibration: Calibration) -> list[KernelRun]:
    """How long that takes on each core. Cores that work on a kernel together have equal shares of HBM's bandwidth,
    whether or not the other one uses its own at that moment.

    Raises:
        SimulationError: It takes for ever.
    """
    return [
        KernelRun(
            kernel,
            trace,
            replay(
                kernel.schedule,
                kernel.blocks,
                trace,
                dma=FifoDma(calibration, sharing=len(traces)),
                matrix=QueuedMatrix(calibration.matrix),
                granule=calibration.memory.granule_bytes,
            ),
        )
        for trace in traces
    ]
