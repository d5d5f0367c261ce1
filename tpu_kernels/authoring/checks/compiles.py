"""The real TPU compiler on every generation that a kernel claims, and how fast its schedules are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ...analysis import CompileReport, Job, compile_many
from ...analysis.sizes import format_bytes
from ...analysis.target import GENERATIONS
from ...analysis.workload import benchmark_cases, declares_calls, kernel_cases, parse_workload
from ...errors import AnalysisError
from ..examples import Example
from .report import Figure, Finding
from .subject import NotRun, Subject, describe

# A kernel that is told workloads, and not sizes of its own, is compiled for this one.
_WORKLOAD = "qwen3-30b-a3b:decode:64"
# Of what a kernel may have of VMEM: above that, the next version of the compiler may refuse it.
_TIGHT = 0.95
_SLOW = 0.25


def check_compile(subject: Subject) -> Iterator[Finding]:
    """Compile: each claimed generation, with the VMEM that is left."""
    generations: list[str] = [name for name in subject.generations if name in GENERATIONS]
    if not generations:
        raise NotRun("the kernel claims no generation that there is")
    if subject.quick:
        generations = [subject.generation]
    jobs = [job for generation in generations for job in _jobs(subject, generation)]
    try:
        reports = compile_many([job for _, job in jobs])
    except AnalysisError as error:
        raise NotRun(str(error)) from error
    for (name, _), report in zip(jobs, reports, strict=True):
        yield from _findings(subject, name, report)
    used = max((report.vmem_bytes for report in reports), default=0)
    yield Finding(
        "note", f"{len(jobs)} programs for {', '.join(generations)}; at most {format_bytes(used)} of VMEM"
    )


def check_speed(subject: Subject) -> Iterator[Finding]:
    """Speed: simulated time of the schedules, beside what the machine allows."""
    from ...analysis.simulator import simulate_many
    from ...analysis.simulator.calibration import calibrated

    ran = False
    for generation in subject.generations:
        if generation not in calibrated():
            yield Finding("note", f"{generation} is not simulated: there are no timings to calibrate with")
            continue
        for name, job in _jobs(subject, generation):
            try:
                [profile] = simulate_many([job], workers=1)
            except AnalysisError as error:
                yield Finding("note", f"{name} on {generation} is not simulated: {error}")
                continue
            except Exception as error:  # noqa: BLE001  a fault of the simulator, and none of the kernel
                yield Finding("warning", f"{name} on {generation}: the simulator broke: {describe(error)}")
                continue
            ran = True
            roofline = profile.roofline
            value = f"{profile.time_ms * 1e3:.1f} µs, {roofline.ratio:.0%} of the {roofline.bound} roofline"
            yield Finding(
                "warning" if roofline.ratio < _SLOW else "note",
                f"{name} on {generation}: {value} (simulated)",
                figure=Figure(name, generation, value),
            )
    if not ran:
        raise NotRun("no program of the kernel can be simulated")


def _jobs(subject: Subject, generation: str) -> list[tuple[str, Job]]:
    """The kernel's large calls; its small ones where it declares none, or only a part is looked at."""
    if not subject.quick:
        cases = benchmark_cases(subject.module, tpu=generation)
        if not cases and declares_calls(subject.module):
            cases = kernel_cases(subject.module, parse_workload(_WORKLOAD), tpu=generation)
        if cases:
            return [(f"{case.op} {case.name}", case.job) for case in cases]
    return [(example.name, _job(example, generation)) for example in subject.some(subject.examples)]


def _job(example: Example, generation: str) -> Job:
    import jax
    import numpy as np

    arrays: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in example.shapes().items()
    }
    data = {
        name: np.asarray(value, np.int32)
        for name, value in example.arguments.items()
        if not isinstance(value, tuple)
    }
    return Job(example.op, (), generation, {**arrays, **example.static}, data)


def _findings(subject: Subject, name: str, report: CompileReport) -> Iterator[Finding]:
    failure = report.failure
    if failure is not None:
        file, line = None, None
        if failure.location is not None:
            path, _, number = failure.location.rpartition(":")
            file, line = subject.locate(path, int(number))
        elif failure.stage == "lower":
            places = re.findall(r'File "([^"]+)", line (\d+)', failure.text)
            found = [subject.locate(path, int(number)) for path, number in places]
            file, line = next((place for place in reversed(found) if place[0]), (None, None))
        what = f"{failure.memory} overflow: " if failure.memory else ""
        message = f"{name} does not compile for {report.generation}: {what}{failure.summary}"
        yield Finding("error", message, file, line)
    for kernel in report.kernels:
        used, limit = kernel.vmem_bytes, kernel.vmem_limit_bytes
        if used and limit and used > _TIGHT * limit:
            yield Finding(
                "warning",
                f"{name} on {report.generation}: the kernel {kernel.name} takes {format_bytes(used)} of the "
                f"{format_bytes(limit)} of VMEM that it may have",
            )
