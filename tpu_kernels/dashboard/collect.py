"""Collects facts: from the compiler and the simulator, and from what other commands wrote."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import __version__, hub
from ..analysis import CompileReport, compile_many
from ..analysis.workload import Case, benchmark_cases, declares_calls, every_case, parse_workload
from ..bench.results import ArmResult, DecodeResult
from ..errors import DashboardError, SimulationError
from ..packages import installed
from .facts import Facts, KernelFacts, ModelFacts, PeerFacts, Run, Status

CASES = ("qwen3-30b-a3b:decode:8", "qwen3-30b-a3b:decode:64")
_PACKAGES = ("jax", "libtpu", "torch", "torch-tpu", "transformers")


def collect(
    kernels: Iterable[tuple[str, int]],
    cases: Sequence[str] = CASES,
    *,
    source: str | None = None,
    generations: Sequence[str] | None = None,
    on_kernel: Callable[[str], None] = lambda name: None,
) -> Facts:
    """Compiles and simulates kernels in cases of models. No TPU is needed; outcomes of the compiler are kept.

    Args:
        kernels: Names and versions.
        cases: Layers of models, `<model>:<phase>:<tokens>`; a kernel that declares no calls of these is shown in its
            own benchmarks.
        source: Where the kernels are, as for `get_kernel`.
        generations: Only these of each kernel's.
        on_kernel: Is called with each kernel's name before it is looked at.

    Raises:
        AnalysisError: There is no such case, or the compiler does not run here.
        TpuKernelsError: A kernel cannot be loaded.
    """
    found = []
    for name, version in kernels:
        on_kernel(name)
        found.append(_kernel(name, version, cases, source, generations))
    return Facts(made=_now(), versions=_versions(), kernels=tuple(found))


def _kernel(
    name: str, version: int, cases: Sequence[str], source: str | None, generations: Sequence[str] | None
) -> KernelFacts:
    module = hub.get_kernel(name, version=version, source=source, check_arch=False)
    loaded = hub.find_loaded(module)
    assert loaded is not None
    claimed = loaded.metadata.tpu.generations if loaded.metadata.tpu else ()
    chosen = [each for each in claimed if generations is None or each in generations]
    runs = [run for generation in chosen for run in _runs(module, cases, generation)]
    places = {(run.op, run.case): place for place, run in reversed(list(enumerate(runs)))}
    runs.sort(key=lambda run: places[run.op, run.case])  # a call's generations beside each other
    return KernelFacts(
        name=name, version=version, build=loaded.metadata.id, generations=tuple(claimed), runs=tuple(runs)
    )


def _runs(module: ModuleType, cases: Sequence[str], generation: str) -> list[Run]:
    if declares_calls(module):
        layers = map(parse_workload, cases)
        calls = [case for layer in layers for case in every_case(module, layer, tpu=generation)]
    else:
        calls = benchmark_cases(module, tpu=generation)
    reports = compile_many([call.job for call in calls])
    return [_run(call, report, generation) for call, report in zip(calls, reports, strict=True)]


def _run(case: Case, report: CompileReport, generation: str) -> Run:
    run = Run(generation=generation, op=case.op, case=case.name, compiled=report.compiled)
    if report.failure is not None:
        return run.model_copy(update={"reason": report.failure.summary})
    from ..analysis.simulator import simulation
    from ..analysis.simulator.calibration import calibrated, load_calibration

    run = run.model_copy(update={"vmem_bytes": report.vmem_bytes})
    if generation not in calibrated():
        return run.model_copy(update={"reason": "not simulated: there are no recorded times to calibrate on"})
    try:
        profile = simulation.profile_of(case.job, report, load_calibration(generation))
    except SimulationError as error:
        return run.model_copy(update={"reason": f"not simulated: {error}"})
    floor = max(profile.roofline.compute_ms, profile.roofline.memory_ms)
    known = {"time_ms": profile.time_ms, "error": profile.error, "floor_ms": floor, "evidence": "simulated"}
    return run.model_copy(update=known)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _versions() -> dict[str, str]:
    found = {"tpu-kernels": __version__} | {name: installed(name) for name in _PACKAGES}
    return {name: version for name, version in found.items() if version is not None}


def read_checks(path: Path) -> tuple[str, dict[str, Status]]:
    """What `tpu-kernels check --json` wrote: the kernel's name, and what each check came to.

    Raises:
        DashboardError: It is no such file.
    """
    report = _read(path, "check")
    try:
        return report["kernel"], {check["check"]: check["status"] for check in report["checks"]}
    except (KeyError, TypeError) as error:
        raise _other(path, "check") from error


def read_decode(path: Path) -> list[ModelFacts]:
    """What `tpu-kernels bench decode --json` wrote.

    Raises:
        DashboardError: It is no such file.
    """
    try:
        result = DecodeResult.from_json(path.read_text())
    except (OSError, ValueError) as error:
        raise DashboardError(f"{path} cannot be read: {error}") from error
    return [_model(result, arm) for arm in result.arms]


def _model(result: DecodeResult, arm: ArmResult) -> ModelFacts:
    facts = ModelFacts(
        model=result.config.model,
        arm=arm.experts,
        batch=arm.batch,
        tokens="not run",
        evidence=result.evidence,
        device=result.device,
        note=arm.not_run or "",
        about=result.model,
        runs_as=arm.runs_as,
    )
    measurement = arm.measurement
    if measurement is None:
        return facts
    same = "reference" if measurement.reference == arm.experts else "same"
    return facts.model_copy(
        update={
            "tokens": same if measurement.difference is None else "differ",
            "graphs": measurement.graphs,
            "recompile_limit_hit": measurement.recompile_limit_hit,
            "tokens_per_s": measurement.tokens_per_s.median,
        }
    )


def read_peers(path: Path, kernel: str) -> list[PeerFacts]:
    """What `python -m benchmarks.bench_ragged_dot --json`, or another comparison with the same keys, wrote.

    Args:
        path: The file: a list of objects with generation, problem, ours_ms, floor_ms and peer_ms.
        kernel: org/name of ours.

    Raises:
        DashboardError: It is no such file.
    """
    rows = _read(path, "comparison")
    try:
        return [
            PeerFacts(
                kernel=kernel,
                generation=row["generation"],
                problem=f"{row['kind']} {row['problem']}",
                ours_ms=row["ours_ms"],
                floor_ms=row["floor_ms"],
                peer_ms=row["peer_ms"],
            )
            for row in rows
            if row["ours_ms"] is not None
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise _other(path, "comparison") from error


def _read(path: Path, what: str) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DashboardError(f"{path} cannot be read as the result of a {what}: {error}") from error


def _other(path: Path, what: str) -> DashboardError:
    return DashboardError(f"{path} is not the result of a {what}, or of another version's")
