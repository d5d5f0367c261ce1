"""What a simulation says about a function."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..sizes import format_bytes
from .timeline import Span, chrome_trace

_SHOWN_OPS = 5


@dataclass(frozen=True)
class KernelTime:
    """The part of one kernel of the program.

    Attributes:
        name: The kernel's.
        runs: How often it is called.
        time_ms: Of all calls.
    """

    name: str
    runs: int
    time_ms: float


@dataclass(frozen=True)
class Traffic:
    """What the kernels' DMAs move from and to an operand's place in HBM.

    Attributes:
        kernel: The kernel's name.
        operand: The argument of the program that it is, or what computes it.
        shape: As XLA writes it.
        size_bytes: Of the whole operand: the least that is moved if all of it is needed.
        read_bytes, written_bytes: That are moved.
    """

    kernel: str
    operand: str
    shape: str
    size_bytes: int
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True)
class Roofline:
    """What the machine allows.

    Attributes:
        flops: Floating-point operations, as the kernels' `cost_estimate`s have them, or else all that the matrix
            units do.
        hbm_bytes: That the kernels move.
        compute_ms: The flops at the published peak.
        memory_ms: The bytes at attainable bandwidth.
        ratio: The larger of both, over the simulated time.
    """

    flops: float
    hbm_bytes: int
    compute_ms: float
    memory_ms: float
    ratio: float

    @property
    def bound(self) -> str:
        """Which of both is larger."""
        return "compute" if self.compute_ms > self.memory_ms else "memory"


@dataclass(frozen=True)
class XlaTime:
    """An op beside the kernels, which is not simulated.

    Attributes:
        name: In the optimised program.
        kind: As in `analysis.XlaOp`.
        shape: Of its largest result.
        bytes: Read and written in HBM.
        estimated_ms: The bytes at attainable bandwidth, and a fixed time for each op.
    """

    name: str
    kind: str
    shape: str
    bytes: int
    estimated_ms: float


@dataclass(frozen=True)
class Profile:
    """A simulation's word on a function: the time of its kernels on one device, and what it goes into.

    Nothing was run on a TPU: `evidence` says so.

    Attributes:
        function: The function's name.
        target: As asked for, e.g. `v6e-8`.
        generation: v5e, v5p, v6e or tpu7x.
        time_ms: Of the kernels.
        error: Mean error of simulated times on this generation, as a fraction; of kernels like those that the
            calibration has records of. None where it has too few.
        cycles: Of the core, that the kernels take.
        compute, stall, overhead: Shares of the time: in bundles that do vector or matrix work (waiting for the
            matrix units included); waiting for DMAs; in bundles of scalar work alone, such as the bookkeeping of
            a pipeline.
        kernels: Each of the program's kernels.
        traffic: HBM bytes by operand.
        units: Share of the time that each unit is busy, if it were without a break: MXU, VPU, XLU, EUP, load,
            store, scalar.
        roofline: Where that is among what the machine allows.
        xla_ops: What XLA runs beside the kernels, costliest first. Estimated; no part of `time_ms`. Ops within a
            loop are counted once.
        versions: Of jax, jaxlib and libtpu.
        calibration: The libtpu version whose schedules the constants were fitted on.
        cached: The program was compiled before, not now.
        timeline: Kernels, loops, DMAs and waits.
        evidence: How these figures came about.
    """

    function: str
    target: str
    generation: str
    time_ms: float
    error: float | None
    cycles: int
    compute: float
    stall: float
    overhead: float
    kernels: tuple[KernelTime, ...]
    traffic: tuple[Traffic, ...]
    units: Mapping[str, float]
    roofline: Roofline
    xla_ops: tuple[XlaTime, ...]
    versions: Mapping[str, str]
    calibration: str
    cached: bool
    timeline: tuple[Span, ...] = field(repr=False, compare=False, default=())
    evidence: str = "simulated"

    @property
    def xla_ms(self) -> float:
        """What the ops beside the kernels are estimated to take."""
        return sum(op.estimated_ms for op in self.xla_ops)

    @property
    def hbm_bytes(self) -> int:
        """All that the kernels move."""
        return self.roofline.hbm_bytes

    def to_json(self) -> str:
        """All of the profile but the timeline."""
        values: dict[str, Any] = dataclasses.asdict(dataclasses.replace(self, timeline=()))
        del values["timeline"]
        return json.dumps(values | {"xla_ms": self.xla_ms}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Reads what `to_json` wrote; there is no timeline in it.

        Raises:
            ValueError: It is something else.
        """
        values = json.loads(text)
        try:
            del values["xla_ms"]
            return cls(
                **values
                | {
                    "kernels": tuple(KernelTime(**kernel) for kernel in values["kernels"]),
                    "traffic": tuple(Traffic(**operand) for operand in values["traffic"]),
                    "roofline": Roofline(**values["roofline"]),
                    "xla_ops": tuple(XlaTime(**op) for op in values["xla_ops"]),
                }
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"no profile: {error}") from error

    def write_trace(self, path: str | Path) -> None:
        """Writes the timeline in Chrome's trace format, which https://ui.perfetto.dev opens.

        Args:
            path: A file, by convention `*.json`; one that is there is replaced.
        """
        title = f"{self.function} on {self.target} (simulated)"
        Path(path).write_text(chrome_trace(title, self.timeline), encoding="utf-8")

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(profile: Profile) -> list[str]:
    error = "error not known" if profile.error is None else f"± {profile.error:.1%}"
    built = ", ".join(f"{name} {profile.versions[name]}" for name in ("jax", "libtpu"))
    cached = "; compiled before" if profile.cached else ""
    roofline = profile.roofline
    lines = [
        f"{profile.function} on {profile.target}, simulated: {_time(profile.time_ms)} {error} ({built}{cached})",
        f"  cycles   {profile.cycles}: {profile.compute:.0%} compute, {profile.stall:.0%} waiting for DMA, "
        f"{profile.overhead:.0%} overhead",
        f"  roofline {roofline.ratio:.0%} of what is attainable: {_time(roofline.memory_ms)} for "
        f"{format_bytes(roofline.hbm_bytes)}, {_time(roofline.compute_ms)} for {roofline.flops:.3g} flops "
        f"({roofline.bound}-bound)",
        "  busy     " + ", ".join(f"{unit} {share:.0%}" for unit, share in profile.units.items()),
    ]
    if len(profile.kernels) > 1 or any(kernel.runs > 1 for kernel in profile.kernels):
        lines += [
            f"  kernel   {kernel.name}: {_time(kernel.time_ms)}"
            f"{f' in {kernel.runs} calls' if kernel.runs > 1 else ''}"
            for kernel in profile.kernels
        ]
    for operand in profile.traffic:
        moved = operand.read_bytes + operand.written_bytes
        ways = [
            f"{format_bytes(count)} {way}"
            for way, count in (("read", operand.read_bytes), ("written", operand.written_bytes))
            if count
        ]
        lines.append(
            f"  HBM      {operand.operand} {operand.shape}: {', '.join(ways)}, "
            f"{moved / operand.size_bytes:.2f} of its {format_bytes(operand.size_bytes)}"
        )
    if not profile.xla_ops:
        lines.append("  beside   no XLA ops")
    else:
        lines.append(
            f"  beside   {len(profile.xla_ops)} XLA ops, not simulated: about {_time(profile.xla_ms)} more"
        )
    for op in profile.xla_ops[:_SHOWN_OPS]:
        lines.append(
            f"           {op.kind} {op.shape}, {format_bytes(op.bytes)}: about {_time(op.estimated_ms)}"
        )
    if len(profile.xla_ops) > _SHOWN_OPS:
        lines.append(f"           {len(profile.xla_ops) - _SHOWN_OPS} more, smaller")
    return lines


def _time(ms: float) -> str:
    return f"{ms:.3f} ms" if ms >= 1 else f"{ms * 1000:.1f} us"
