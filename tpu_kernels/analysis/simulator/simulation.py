"""`simulate` and `simulate_many`: how long a function's kernels take on a TPU, and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import SimulationError
from .. import hlo
from ..compiler import DEFAULT_TIMEOUT, Job, compile_many
from ..export import bind
from ..outcome import unpack
from ..report import CompileReport
from ..target import parse_target
from .calibration import Calibration, load_calibration
from .kernel import KernelRun, follow, load_kernel, time
from .operands import KernelCall, find_kernel_calls
from .profile import KernelTime, Profile, Roofline, Traffic, XlaTime
from .timeline import Span, kernel_spans

_ROWS_OF_MULTIPLY = 16  # of bfloat16


def simulate(
    fn: Any,
    *args: Any,
    tpu: str = "v6e",
    data: Mapping[str, Any] | None = None,
    static: Mapping[str, Any] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Profile:
    """Simulates the Pallas kernels of a function on a TPU, from the compiler's final schedule. No TPU needed.

    The scalar side of each kernel is executed, so that its loops, branches and DMAs are those of a real run on
    the given integers; the time of DMAs and of the matrix units comes from models whose constants were fitted on
    recorded times of real TPUs.

    Args:
        fn: A JAX function of arrays with Pallas kernels in it, or an op declared with `tpu_kernels.ops`.
        *args: As for `compile`: only shapes and dtypes count.
        tpu: A generation (v5e, v5p, v6e, tpu7x) or a slice such as v6e-8, of which one device is simulated.
        data: Integer arrays by the name of the argument of `fn` that they are for: what control flow depends on,
            such as group sizes.
        static: Keyword arguments of `fn` that are no arrays.
        timeout: Of the compiler, in seconds.

    Raises:
        SimulationError: The function does not compile, calls no kernel, or its kernels cannot be followed; the
            message says where and why.
        AnalysisError: There is no such target, the op has other arguments, or the compiler is not installed.

    Example:
        >>> import jax.numpy as jnp
        >>> from tpu_kernels import get_kernel
        >>> kernel = get_kernel("tpu-kernels/ragged-dot", version=1)
        >>> shapes = [((512, 2048), "bfloat16"), ((128, 2048, 1536), "bfloat16"), ((128,), "int32")]
        >>> arrays = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        >>> profile = simulate(kernel.ragged_dot, *arrays, data={"group_sizes": [4] * 128})
        >>> profile.roofline.bound
        'memory'
    """
    [profile] = simulate_many([Job(fn, args, tpu, static or {}, data or {})], workers=1, timeout=timeout)
    return profile


def simulate_many(
    jobs: Iterable[Job],
    *,
    workers: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    on_report: Callable[[CompileReport], None] | None = None,
) -> list[Profile]:
    """Simulates several functions, or one for several targets; their compiles are in parallel.

    Args:
        jobs: What to simulate.
        workers, timeout, on_report: As in `compile_many`.

    Returns:
        The profiles, in the order of the jobs.

    Raises:
        SimulationError, AnalysisError: As in `simulate`.
    """
    jobs = list(jobs)
    calibrations = [load_calibration(parse_target(job.tpu).generation) for job in jobs]
    reports = compile_many(jobs, workers=workers, timeout=timeout, on_report=on_report)
    return [profile_of(*each) for each in zip(jobs, reports, calibrations, strict=True)]


@dataclass(frozen=True)
class CalledKernel:
    """A kernel of a compiled program, and what it is called on.

    Attributes:
        name: The kernel's.
        bundles, utilization: The compiler's texts on it.
        operands: Names of its operands and results.
        calls: The integers in its operands, by place; those that it copies to scalar memory; and how often it is
            called on them.
    """

    name: str
    bundles: str
    utilization: str
    operands: tuple[str, ...]
    calls: tuple[tuple[Mapping[int, tuple[int, ...]], tuple[tuple[int, ...] | None, ...], int], ...]


def called_kernels(job: Job, report: CompileReport) -> list[CalledKernel]:
    """The kernels of a program, with the integers they are given.

    Args:
        job: The function, and data for its integer arguments.
        report: What the compiler made of it.

    Raises:
        SimulationError: It does not compile, calls no kernel, or that cannot be told.
    """
    if report.failure is not None:
        raise SimulationError(f"{report.function} does not compile for {job.tpu}: {report.failure.summary}")
    if not report.kernels:
        raise SimulationError(f"{report.function} has no Pallas kernel in it; nothing else is simulated")
    target = parse_target(job.tpu)
    calls = find_kernel_calls(bind(job.fn, job.args, job.static, target.generation), job.data, target)
    called = []
    for kernel, runs in _assigned(report, calls):
        if kernel.instruction not in report.bundles:
            raise SimulationError(f"the compiler wrote no schedule of {kernel.name} ({kernel.instruction})")
        # A kernel that is called twice on the same integers does the same.
        distinct = Counter((tuple(sorted(call.data.items())), call.copied) for call in runs)
        results = len(kernel.dims) - len(kernel.operands)
        called.append(
            CalledKernel(
                kernel.name,
                unpack(report.bundles[kernel.instruction]),
                unpack(report.utilization[kernel.instruction]),
                (*kernel.operands, *(f"result {n}" if results > 1 else "result" for n in range(results))),
                tuple((dict(data), copied, count) for (data, copied), count in distinct.items()),
            )
        )
    return called


def profile_of(job: Job, report: CompileReport, calibration: Calibration) -> Profile:
    summary = _Summary(calibration)
    for called in called_kernels(job, report):
        kernel = load_kernel(called.bundles, called.utilization, calibration)
        for data, copied, count in called.calls:
            traces = follow(kernel, data, copied, called.operands, calibration)
            summary.add(called.name, time(kernel, traces, calibration), called.operands, count)
    return summary.profile(report)


def _assigned(report: CompileReport, calls: list[KernelCall]) -> list[tuple[hlo.Kernel, list[KernelCall]]]:
    """The calls of each of the program's kernels.

    Both are in the order of the program. XLA may reorder kernels or merge equal ones, but those whose operands
    have the same shapes stay in order.
    """
    sites: dict[tuple[int, ...], list[KernelCall]] = defaultdict(list)
    for call in calls:
        sites[call.site].append(call)
    by_shapes: dict[Any, list[list[KernelCall]]] = defaultdict(list)
    for group in sites.values():
        by_shapes[group[0].shapes].append(group)
    kernels: dict[Any, list[hlo.Kernel]] = defaultdict(list)
    for kernel in report.kernels:
        kernels[kernel.dims].append(kernel)
    assigned = []
    for dims, same in kernels.items():
        groups = by_shapes.get(dims, [])
        if not groups:
            raise SimulationError(
                f"no call of the compiled program's kernel {same[0].name} is found in the function"
            )
        if len(groups) != len(same) and len({tuple(sorted(c.data.items())) for g in groups for c in g}) != 1:
            raise SimulationError(
                f"the compiled program has {len(same)} kernels like {same[0].name}, and the function calls "
                f"{len(groups)} on different integers: which is which cannot be told"
            )
        # Merged or unrolled ones do the same, whichever they are.
        assigned += [(kernel, groups[min(place, len(groups) - 1)]) for place, kernel in enumerate(same)]
    return assigned


class _Summary:
    """Adds up the runs of kernels."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._kernels: Counter[str] = Counter()
        self._times: dict[str, float] = defaultdict(float)
        self._traffic: dict[tuple[str, str, str, int], list[int]] = defaultdict(lambda: [0, 0])
        self._units: dict[str, float] = defaultdict(float)
        self._cycles = self._stall = self._overhead = 0.0
        self._multiplies = 0.0
        self._spans: list[Span] = []

    def add(self, name: str, cores: Sequence[KernelRun], names: Sequence[str], count: int) -> None:
        # A kernel takes as long as the slower core, and moves and multiplies what both do.
        run = max(cores, key=lambda core: core.timing.cycles)
        calibration, timing = self._calibration, run.timing
        start_us = self._ms(self._cycles) * 1e3
        self._spans += kernel_spans(name, run, names, start_us=start_us, clock_ghz=calibration.clock_ghz)
        self._kernels[name] += count
        self._times[name] += timing.cycles * count
        self._cycles += timing.cycles * count
        self._stall += timing.stall_cycles * count
        utilization, bundles = run.kernel.utilization, run.kernel.schedule.bundles
        self._overhead += float(run.bundle_runs[~utilization.computes()].sum()) * count
        multiplies = np.array(
            [
                sum(0.5 if op.float32 else 1.0 for op in bundle.matrix if op.kind == "multiply")
                for bundle in bundles
            ]
        )
        cycles = calibration.matrix.multiply_cycles / utilization.matrix_units
        self._units["MXU"] += float(run.bundle_runs @ multiplies) * count * cycles
        for unit, busy in utilization.busy(run.bundle_runs).items():
            self._units[unit] += busy * count
        operands = {operand.index: operand for operand in run.kernel.schedule.operands}
        for core in cores:
            self._multiplies += float(core.bundle_runs @ multiplies) * count
            for transfer in core.timing.transfers:
                if transfer.operand is not None:
                    shape = operands[transfer.operand].shape
                    key = (name, names[transfer.operand], shape, transfer.operand)
                    self._traffic[key][transfer.write] += transfer.size * count

    def profile(self, report: CompileReport) -> Profile:
        calibration = self._calibration
        time_ms = self._ms(self._cycles)
        hbm_bytes = sum(map(sum, self._traffic.values()))
        flops = report.flops or self._multiplies * 2 * _ROWS_OF_MULTIPLY * calibration.matrix.side**2
        compute_ms = flops / calibration.peak_tflops / 1e9
        memory_ms = hbm_bytes / calibration.memory.attainable_gbps / 1e6
        return Profile(
            function=report.function,
            target=report.target,
            generation=report.generation,
            time_ms=time_ms,
            error=calibration.mean_error,
            cycles=round(self._cycles),
            compute=1 - (self._stall + self._overhead) / self._cycles,
            stall=self._stall / self._cycles,
            overhead=self._overhead / self._cycles,
            kernels=tuple(
                KernelTime(name, count, self._ms(self._times[name])) for name, count in self._kernels.items()
            ),
            traffic=tuple(
                Traffic(kernel, operand, shape, hlo.shape_bytes(shape), read, written)
                for (kernel, operand, shape, _), (read, written) in self._traffic.items()
            ),
            units={unit: cycles / self._cycles for unit, cycles in self._units.items()},
            roofline=Roofline(flops, hbm_bytes, compute_ms, memory_ms, max(compute_ms, memory_ms) / time_ms),
            xla_ops=_xla_ops(report, calibration),
            versions=report.versions,
            calibration=calibration.libtpu,
            cached=report.cached,
            timeline=tuple(self._spans),
        )

    def _ms(self, cycles: float) -> float:
        return cycles / self._calibration.clock_ghz / 1e6


def _xla_ops(report: CompileReport, calibration: Calibration) -> tuple[XlaTime, ...]:
    _, ops = hlo.read_program(report.hlo, smallest=0)
    times = [
        XlaTime(
            op.name,
            op.kind,
            op.shape,
            op.traffic_bytes,
            op.traffic_bytes / calibration.memory.attainable_gbps / 1e6 + calibration.op_us / 1e3,
        )
        for op in ops
    ]
    return tuple(sorted(times, key=lambda op: -op.estimated_ms))
