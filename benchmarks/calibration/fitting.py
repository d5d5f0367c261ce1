"""Times of compiled records under a calibration, and the calibration that fits them best."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

from benchmarks.calibration.programs import XlaOp, load_program
from benchmarks.calibration.records import Record
from tpu_kernels.analysis.simulator.calibration import Calibration
from tpu_kernels.analysis.simulator.kernel import Kernel, follow, load_kernel, time
from tpu_kernels.analysis.simulator.trace import Trace
from tpu_kernels.errors import SimulationError


@dataclasses.dataclass(frozen=True)
class Subject:
    """A record whose kernels have been followed, so that only their timing is left to do."""

    record: Record
    kernels: tuple[tuple[Kernel, list[Trace], int], ...]
    ops: tuple[XlaOp, ...]

    def simulated_ms(self, calibration: Calibration) -> float:
        """The kernels, and what XLA runs beside them: the recorded times are of all that the device did."""
        cycles = sum(
            max(core.timing.cycles for core in time(kernel, traces, calibration)) * count
            for kernel, traces, count in self.kernels
        )
        moved = sum(op.bytes for op in self.ops if not op.beside)
        beside = moved / calibration.memory.attainable_gbps / 1e6 + len(self.ops) * calibration.op_us / 1e3
        return cycles / calibration.clock_ghz / 1e6 + beside

    def error(self, calibration: Calibration) -> float:
        """Of the simulated time, as a fraction of the recorded one."""
        return self.simulated_ms(calibration) / self.record.median_ms - 1

    def roofline_error(self, calibration: Calibration) -> float:
        """Of the plain roofline."""
        roofline = self.record.roofline_ms(
            peak_tflops=calibration.peak_tflops, gbps=calibration.memory.nominal_gbps
        )
        return roofline / self.record.median_ms - 1


def load_subjects(
    records: Sequence[Record], calibration: Calibration, on_error: Callable[[Record, str], None]
) -> list[Subject]:
    """The compiled ones among `records`; those that cannot be followed are told of."""
    subjects = []
    for record in records:
        program = load_program(record)
        if program is None:
            on_error(record, "not compiled")
            continue
        try:
            kernels = []
            for called in program.kernels:
                kernel = load_kernel(called.bundles, called.utilization, calibration)
                for data, copied, count in called.calls:
                    traces = follow(kernel, data, copied, called.operands, calibration)
                    kernels.append((kernel, traces, count))
            subjects.append(Subject(record, tuple(kernels), program.ops))
        except SimulationError as error:
            on_error(record, str(error))
    return subjects


def get(calibration: Calibration, path: str) -> float:
    """A constant by its dotted name."""
    value: object = calibration
    for name in path.split("."):
        value = getattr(value, name)
    assert isinstance(value, (int, float))
    return value


def put(calibration: Calibration, path: str, value: float) -> Calibration:
    """The calibration with another value for a constant."""
    first, _, rest = path.partition(".")
    if rest:
        part = getattr(calibration, first)
        return calibration.model_copy(update={first: part.model_copy(update={rest: value})})
    return calibration.model_copy(update={first: value})


def loss(subjects: Sequence[Subject], calibration: Calibration) -> float:
    """Mean of the absolute logarithms of the ratios: half and double are equally far off."""
    return statistics.fmean(abs(math.log(s.simulated_ms(calibration) / s.record.median_ms)) for s in subjects)


def fit(
    subjects: Sequence[Subject],
    calibration: Calibration,
    constants: Sequence[str],
    *,
    rounds: int = 3,
    on_step: Callable[[str, float, float], None] = lambda name, value, loss: None,
) -> Calibration:
    """Betters one constant after the other by a factor that shrinks, as long as that helps."""
    best = loss(subjects, calibration)
    for step in [1.15, 1.05, 1.02][:rounds]:
        for name in constants:
            if not get(calibration, name):
                continue  # a part that this generation's model is without
            for factor in (step, 1 / step):
                while True:
                    tried = put(calibration, name, get(calibration, name) * factor)
                    found = loss(subjects, tried)
                    if found >= best - 1e-4:
                        break
                    calibration, best = tried, found
                    on_step(name, get(calibration, name), best)
    return calibration
