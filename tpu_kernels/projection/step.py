"""The times of a step's parts, put together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..analysis import CompileReport, Job
from ..analysis.simulator.calibration import Calibration
from ..analysis.simulator.simulation import profile_of
from ..errors import ProjectionError
from .records import Answer, Arm, CutCall, Part
from .terms import collective_bounds
from .times import Bounds, OpTime, bounds_of, op_times

_PLACES = {"decode_attention": "attention"}
COLLECTIVES = "exchange"


@dataclass(frozen=True)
class PartTimes:
    """A part of a step, once.

    Attributes:
        part: Which.
        report: What the compiler made of it.
        ops: XLA's ops, those around the kernels of its calls included.
        bounds: Of all of it, with expected routing.
        worst_us: At most, with the worst routing.
        places: What keeps the core busy, by part of the model, in microseconds.
    """

    part: Part
    report: CompileReport
    ops: tuple[OpTime, ...]
    bounds: Bounds
    worst_us: float
    places: Mapping[str, float] = field(repr=False)


@dataclass(frozen=True)
class CallResult:
    """A kernel call with one routing: its job and what the compiler made of it."""

    call: CutCall
    job: Job
    report: CompileReport


def part_times(
    part: Part,
    report: CompileReport,
    expected: Sequence[CallResult],
    worst: Sequence[CallResult],
    calibration: Calibration,
) -> PartTimes:
    """The times of a part.

    Raises:
        ProjectionError: Its program does not compile, or has a kernel that was not cut out.
    """
    where = part.kind or "the ends of the step"
    if report.failure is not None:
        raise ProjectionError(f"{where} does not compile for {report.target}: {report.failure.summary}")
    if report.kernels:
        names = ", ".join(kernel.name for kernel in report.kernels)
        raise ProjectionError(f"{where} calls kernels that are not projected: {names}")
    ops = op_times(report, calibration)
    bounds = bounds_of(ops, calibration)
    worst_us = bounds.high
    places: defaultdict[str, float] = defaultdict(float)
    for op in ops:
        places[op.place] += op.us
    for result in expected:
        kernel_us = profile_of(result.job, result.report, calibration).time_ms * 1e3
        around = op_times(result.report, calibration)
        bounds += _with_kernel(kernel_us, around, calibration)
        places[_PLACES.get(result.call.op, "experts")] += kernel_us + sum(op.us for op in around)
        ops += around
    for result in worst:
        kernel_us = profile_of(result.job, result.report, calibration).time_ms * 1e3
        around = op_times(result.report, calibration)
        worst_us += _with_kernel(kernel_us, around, calibration).high
    return PartTimes(part, report, tuple(ops), bounds, worst_us, dict(places))


def _with_kernel(kernel_us: float, around: Iterable[OpTime], calibration: Calibration) -> Bounds:
    started = Bounds(kernel_us, kernel_us + calibration.op_us)
    return started + bounds_of(around, calibration)


@dataclass(frozen=True)
class DeviceStep:
    """The device's part of a step.

    Attributes:
        expected: With expected routing.
        worst_us: At most, with the worst routing.
        places: What keeps the core busy, in microseconds, by part of the model; and what chips exchange.
        hbm_bytes: Of a chip: weights, cache, and what the largest part holds beside them.
        parts: The parts, and how often each is run.
    """

    expected: Bounds
    worst_us: float
    places: dict[str, float]
    hbm_bytes: int
    parts: tuple[tuple[PartTimes, int], ...]


def device_step(
    answer: Answer, arm: Arm, batch: int, times: Mapping[str, PartTimes | str], generation: str
) -> DeviceStep:
    """Puts the parts of an arm's step together.

    Args:
        answer: What was exported.
        arm, batch: Whose step.
        times: By the part's file; of this step's parts there are all.
        generation: The TPU's.
    """
    counts = {kind.name: kind.count for kind in answer.layers}
    parts = tuple(
        (each, 1 if part.kind is None else counts[part.kind])
        for part in answer.parts
        if part.batch == batch and part.arm in (arm, None) and not isinstance(each := times[part.file], str)
    )
    total, worst_us = Bounds(), 0.0
    places: defaultdict[str, float] = defaultdict(float)
    resident = temporary = 0
    for each, count in parts:
        exchanged = Bounds()
        for collective in answer.collectives[each.part.kind or ""]:
            exchanged += collective_bounds(collective, batch, generation)
        total += (each.bounds + exchanged) * count
        worst_us += (each.worst_us + exchanged.high) * count
        for place, us in each.places.items():
            places["head" if each.part.kind is None else place] += us * count
        if exchanged.high:
            places[COLLECTIVES] += exchanged.middle * count
        memory = each.report.memory
        assert memory is not None
        resident += memory.arguments * count
        temporary = max(temporary, memory.temporaries + memory.outputs + memory.code)
    return DeviceStep(total, worst_us, dict(places), resident + temporary, parts)
