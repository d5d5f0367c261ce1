"""`compile` and `compile_many`: the real TPU compiler, in processes beside this one."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
import os
import platform
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import AnalysisError, TpuKernelsError
from . import cache, process
from .export import Program, bind, lower
from .failure import Failure, read_exception
from .outcome import Outcome
from .report import CompileReport, make_report
from .target import CompileTarget, parse_target

# A kernel takes seconds, a layer at most a minute, on one core.
DEFAULT_TIMEOUT = 300.0


@dataclass(frozen=True)
class Job:
    """One compile or simulation, for `compile_many` and `simulate_many`: the arguments of these.

    For `compile_many`, `fn` may also be a `Program`, which is lowered already. With `every_schedule` the report has
    the schedules of XLA's own ops too. XLA may write results where the arguments whose places are in `donated` were.
    """

    fn: Any
    args: tuple[Any, ...]
    tpu: str = "v6e"
    static: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    every_schedule: bool = False
    donated: tuple[int, ...] = ()


def compile(
    fn: Any,
    *args: Any,
    tpu: str = "v6e",
    static: Mapping[str, Any] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> CompileReport:
    """Compiles a function for a TPU with the real compiler, no TPU needed.

    A function that does not compile gives a report that says why, as does a compiler that crashes or hangs.
    Reports are cached by the program's content, the target, and the versions and flags of the compiler.

    JAX traces the function in this process, and the compiler runs in another. Where JAX has not run yet and
    `JAX_PLATFORMS` is not set, JAX is confined to the CPU in this process, so that it takes no TPU from torch.

    Args:
        fn: A JAX function of arrays, with Pallas kernels in it or not; or an op declared with
            `tpu_kernels.ops`, such as those of a loaded kernel.
        *args: Arrays, `jax.ShapeDtypeStruct`s or torch tensors, also on the meta device. Only their shapes
            and dtypes count, and of a ShapeDtypeStruct a sharding over an abstract mesh of `tpu`'s devices.
            Layouts are XLA's choice, as when the program runs.
        tpu: A generation (v4, v5e, v5p, v6e, tpu7x) or a slice such as v6e-8.
        static: Keyword arguments of `fn` that are no arrays.
        timeout: Of the compiler, in seconds.

    Raises:
        AnalysisError: There is no such target, the op has other arguments, or the compiler is not installed
            or does not run here.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> report = compile(jnp.matmul, *[jax.ShapeDtypeStruct((512, 512), "bfloat16")] * 2, tpu="v5e")
        >>> report.compiled, report.memory.outputs
        (True, 524288)
    """
    [report] = compile_many([Job(fn, args, tpu, static or {})], workers=1, timeout=timeout)
    return report


def compile_many(
    jobs: Iterable[Job],
    *,
    workers: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    on_report: Callable[[CompileReport], None] | None = None,
) -> list[CompileReport]:
    """Compiles several functions, or one for several targets, in parallel.

    Args:
        jobs: What to compile. Equal programs are compiled once.
        workers: Compilers that run at a time; as many as there are cores unless given.
        timeout: Of each compile, in seconds.
        on_report: Is called with each report as it comes, e.g. to show progress.

    Returns:
        The reports, in the order of the jobs.

    Raises:
        AnalysisError: As in `compile`.
    """
    jobs = list(jobs)
    targets = [parse_target(job.tpu) for job in jobs]
    _check_compiler()
    reports: dict[int, CompileReport] = {}
    pending: dict[concurrent.futures.Future[Outcome | Failure], list[tuple[int, Program]]] = {}
    futures: dict[str, concurrent.futures.Future[Outcome | Failure]] = {}

    def finish(
        place: int, result: Outcome | Failure, program: Program | None = None, *, cached: bool = False
    ) -> None:
        kernels = program.kernels if program else {}
        report = make_report(_name(jobs[place].fn), targets[place], result, kernels, cached=cached)
        reports[place] = report
        if on_report is not None:
            on_report(report)

    pool = concurrent.futures.ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)))
    try:
        for place, (job, target) in enumerate(zip(jobs, targets, strict=True)):
            program = _lowered(job, target)
            if isinstance(program, Failure):
                finish(place, program)
                continue
            key = cache.cache_key(program, target)
            kept = cache.load(key)
            if kept is not None:
                finish(place, kept, program, cached=True)
                continue
            if key not in futures:
                futures[key] = pool.submit(_compiled, program, target, timeout, key)
            pending.setdefault(futures[key], []).append((place, program))
        for future in concurrent.futures.as_completed(pending):
            for place, program in pending[future]:
                finish(place, future.result(), program)
    finally:
        # After an error or an interrupt, what has not started is not started.
        pool.shutdown(cancel_futures=True)
    return [reports[place] for place in range(len(jobs))]


def _name(fn: Any) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__))


def _lowered(job: Job, target: CompileTarget) -> Program | Failure:
    if isinstance(job.fn, Program):
        return job.fn
    bound = bind(job.fn, job.args, job.static, target.generation)
    try:
        return dataclasses.replace(lower(bound, target, job.donated), every_schedule=job.every_schedule)
    except TpuKernelsError:
        raise
    except Exception as error:  # noqa: BLE001  whatever stops a kernel from being lowered is the answer
        return read_exception(error, traceback.format_exc())


def _compiled(program: Program, target: CompileTarget, timeout: float, key: str) -> Outcome | Failure:
    result = process.compile_in_process(program, target, timeout)
    # A crash or a timeout may not happen again.
    if isinstance(result, Outcome):
        cache.store(key, result)
    return result


def _check_compiler() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise AnalysisError(
            f"the TPU compiler runs on Linux on x86-64 only; this is {sys.platform} on {platform.machine()}"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise AnalysisError("the TPU compiler is not installed: pip install libtpu")
