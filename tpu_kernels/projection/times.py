"""How long the ops of a compiled program take: the simulator on the final schedule of every op, XLA's own included."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..analysis import hlo
from ..analysis.outcome import unpack
from ..analysis.report import CompileReport
from ..analysis.simulator import kernel as simulator
from ..analysis.simulator.calibration import Calibration
from ..errors import SimulationError
from .places import read_places

UNPLACED = "moves"


@dataclass(frozen=True)
class OpTime:
    """One op.

    Attributes:
        name, kind, shape: As in `analysis.hlo.XlaOp`; of a Pallas kernel the kind is `kernel`.
        place: The part of the model that it is in.
        us: What it keeps the core busy, its waits for HBM included. 0 of what runs beside the core.
        hbm_bytes: What it moves from and to HBM.
        followed: By its schedule; else it is estimated by its bytes.
    """

    name: str
    kind: str
    shape: str
    place: str
    us: float
    hbm_bytes: float
    followed: bool = True


@dataclass(frozen=True)
class Bounds:
    """Microseconds, between which a time is projected to be."""

    low: float = 0.0
    high: float = 0.0

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def __add__(self, other: Bounds) -> Bounds:
        return Bounds(self.low + other.low, self.high + other.high)

    def __mul__(self, factor: float) -> Bounds:
        return Bounds(self.low * factor, self.high * factor)


def op_times(report: CompileReport, calibration: Calibration) -> list[OpTime]:
    """The ops of a program, Pallas kernels left out, which need their operands' integers."""
    places = read_places(report.hlo)
    _, ops = hlo.read_program(report.hlo, smallest=0)
    return [_op_time(op, places.get(op.name, UNPLACED), report, calibration) for op in ops]


def bounds_of(ops: Iterable[OpTime], calibration: Calibration) -> Bounds:
    """What a program of these ops takes.

    At least: the core busy without a gap, or HBM busy without one. At most: each op waits for the one before, takes
    its start (`op_us`) and what was moved ahead for it hides behind nothing.
    """
    ops = list(ops)
    gbps = calibration.memory.attainable_gbps
    busy = sum(op.us for op in ops)
    moved = sum(op.hbm_bytes for op in ops) / gbps / 1e3
    ahead = sum(op.hbm_bytes for op in ops if not op.us) / gbps / 1e3
    starts = sum(bool(op.us) for op in ops) * calibration.op_us
    return Bounds(max(busy, moved), busy + ahead + starts)


def _op_time(op: hlo.XlaOp, place: str, report: CompileReport, calibration: Calibration) -> OpTime:
    if op.name not in report.bundles or op.name not in report.utilization:
        # A DMA that the core starts and goes on, or a name for a view.
        moved = 0 if op.kind == "compute" else op.traffic_bytes
        return OpTime(op.name, op.kind, op.shape, place, 0.0, moved)
    try:
        us, moved = _followed(report.bundles[op.name], report.utilization[op.name], calibration)
    except SimulationError:
        us = op.traffic_bytes / calibration.memory.attainable_gbps / 1e3
        return OpTime(op.name, op.kind, op.shape, place, us, op.traffic_bytes, followed=False)
    return OpTime(op.name, op.kind, op.shape, place, us, moved)


def _followed(bundles: str, utilization: str, calibration: Calibration) -> tuple[float, int]:
    kernel = simulator.load_kernel(unpack(bundles), unpack(utilization), calibration)
    operands = kernel.schedule.operands
    names = [f"operand {n}" for n in range(max((o.index for o in operands), default=0) + 1)]
    try:
        traces = simulator.follow(kernel, {}, (), names, calibration)
    except SimulationError:
        # Indices of rows, or a position: whichever they are, as many bytes move.
        zeros = {
            operand.index: (0,) * max(1, hlo.shape_bytes(operand.shape) // 4)
            for operand in operands
            if operand.shape[:1] in ("s", "u")
        }
        traces = simulator.follow(kernel, zeros, (), names, calibration)
    cores = [core.timing for core in simulator.time(kernel, traces, calibration)]
    moved = sum(each.size for timing in cores for each in timing.transfers if each.operand is not None)
    return max(timing.cycles for timing in cores) / calibration.clock_ghz / 1e3, moved
