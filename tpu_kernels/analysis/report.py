"""What compiling a function for a TPU tells."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .blocks import Block, explain
from .cache import versions
from .failure import Failure, read_error
from .hlo import OVERHEAD, Kernel, XlaOp, read_program
from .outcome import Outcome
from .sizes import format_bytes
from .target import CompileTarget

_SHOWN_OPS = 8


@dataclass(frozen=True)
class Memory:
    """HBM of one device that a program takes, in bytes, padding of tiles included.

    Attributes:
        arguments: Weights and inputs.
        outputs: Results, without those that take an argument's place.
        temporaries: What lives only within the program.
        code: The program itself, its kernels included.
    """

    arguments: int
    outputs: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs + self.temporaries + self.code


@dataclass(frozen=True)
class CompileReport:
    """The real TPU compiler's word on a function. Nothing was run: it says what is, not how fast.

    Attributes:
        function: The function's name.
        target: As asked for, e.g. `v6e-8`.
        generation: v4, v5e, v5p, v6e or tpu7x.
        compiled: Whether it compiles.
        failure: Why not.
        memory: HBM use; None if it does not compile.
        flops: Floating-point operations, by XLA's count, in which a kernel is what its `cost_estimate` says;
            None where nothing is counted.
        bytes_accessed: HBM traffic in bytes, counted the same way.
        kernels: The Pallas kernels in the program and their VMEM.
        ops: What XLA runs around them, largest first.
        seconds: What compiling took, when it was done.
        versions: Of jax, jaxlib and libtpu.
        cached: It was compiled before, not now.
        hlo: The optimised program, without the kernels' bodies.
        bundles, utilization: The kernels' final schedules and what each bundle uses of the units, as in
            `Outcome`.
        evidence: How these figures came about.
    """

    function: str
    target: str
    generation: str
    compiled: bool
    failure: Failure | None
    memory: Memory | None
    flops: float | None
    bytes_accessed: float | None
    kernels: tuple[Kernel, ...]
    ops: tuple[XlaOp, ...]
    seconds: float
    versions: Mapping[str, str]
    cached: bool
    hlo: str = field(repr=False)
    bundles: Mapping[str, str] = field(repr=False)
    utilization: Mapping[str, str] = field(repr=False)
    evidence: str = "compiled"

    @property
    def overhead(self) -> tuple[XlaOp, ...]:
        """The ops that only move or convert data: layout copies, transposes, converts, pads, largest first."""
        return tuple(op for op in self.ops if op.kind in OVERHEAD)

    @property
    def vmem_bytes(self) -> int:
        """VMEM of the kernel that needs most, what XLA keeps there for it included."""
        return max(((k.vmem_bytes or 0) + k.vmem_staged_bytes for k in self.kernels), default=0)

    def to_json(self) -> str:
        """All of the report but the program and the kernels' schedules."""
        values: dict[str, Any] = dataclasses.asdict(self)
        for name in ("hlo", "bundles", "utilization"):
            del values[name]
        return json.dumps(values, indent=2)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def make_report(
    function: str,
    target: CompileTarget,
    result: Outcome | Failure,
    blocks: Mapping[str, tuple[Block, ...]],
    *,
    cached: bool,
) -> CompileReport:
    """The report on what the compiler, or the attempt to run it, came to.

    Args:
        function: The function's name.
        target: What it was compiled for.
        result: What came of it.
        blocks: What each kernel holds in VMEM.
        cached: The result is of an earlier compile.
    """
    outcome = result if isinstance(result, Outcome) else Outcome()
    failure = result if isinstance(result, Failure) else None
    if outcome.error is not None:
        failure = explain(read_error(outcome.error), blocks)
    kernels, ops = read_program(outcome.hlo)
    memory = Memory(
        outcome.argument_bytes,
        outcome.output_bytes - outcome.alias_bytes,
        outcome.temporary_bytes,
        outcome.code_bytes,
    )
    return CompileReport(
        function=function,
        target=target.name,
        generation=target.generation,
        compiled=failure is None,
        failure=failure,
        memory=None if failure else memory,
        flops=outcome.flops,
        bytes_accessed=outcome.bytes_accessed,
        kernels=kernels,
        ops=ops,
        seconds=outcome.seconds,
        versions=dict(versions()),
        cached=cached,
        hlo=outcome.hlo,
        bundles=outcome.bundles,
        utilization=outcome.utilization,
    )


def _lines(report: CompileReport) -> list[str]:
    built = ", ".join(f"{name} {report.versions[name]}" for name in ("jax", "libtpu"))
    when = f"{report.seconds:.1f} s{', cached' if report.cached else ''}"
    head = f"{report.function} for {report.target}:"
    if report.failure is not None:
        # The whole message is in `failure.text`.
        return [
            f"{head} does not compile ({report.failure.stage}; {built})",
            f"  {report.failure.summary}",
        ]
    memory = report.memory
    assert memory is not None
    lines = [
        f"{head} compiled ({when}; {built})",
        f"  HBM      {format_bytes(memory.total)}: arguments {format_bytes(memory.arguments)}, "
        f"outputs {format_bytes(memory.outputs)}, temporaries {format_bytes(memory.temporaries)}, "
        f"code {format_bytes(memory.code)}",
        f"  work     {_count(report)}",
    ]
    for kernel in report.kernels:
        limit = f" of {format_bytes(kernel.vmem_limit_bytes)}" if kernel.vmem_limit_bytes else ""
        staged = (
            f", and {format_bytes(kernel.vmem_staged_bytes)} of operands in VMEM"
            if kernel.vmem_staged_bytes
            else ""
        )
        used = "unknown" if kernel.vmem_bytes is None else format_bytes(kernel.vmem_bytes)
        lines.append(f"  kernel   {kernel.name}: VMEM {used}{limit}{staged}")
    overhead = report.overhead
    if not overhead:
        lines.append("  around   no copies, transposes or converts")
    for op in overhead[:_SHOWN_OPS]:
        layouts = f", {{{op.layouts[0]}}} to {{{op.layouts[1]}}}" if op.layouts else ""
        source = f" of {op.source}" if op.source else ""
        lines.append(f"  around   {op.kind} {op.shape}, {format_bytes(op.bytes)}{source}{layouts}")
    if len(overhead) > _SHOWN_OPS:
        lines.append(f"  around   {len(overhead) - _SHOWN_OPS} more, smaller")
    return lines


def _count(report: CompileReport) -> str:
    flops = "no flops counted" if report.flops is None else f"{report.flops:.3g} flops"
    if report.bytes_accessed is None:
        return f"{flops}, no traffic counted (a kernel's cost_estimate would tell)"
    return f"{flops}, {format_bytes(int(report.bytes_accessed))} accessed"
