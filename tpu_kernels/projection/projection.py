"""`project`: a model's decode step on a TPU slice, from its config alone."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from .. import analysis
from ..analysis import CompileReport, Job, cache
from ..analysis.export import Program
from ..analysis.simulator.calibration import Calibration, load_calibration
from ..analysis.target import CompileTarget, parse_target
from ..errors import ProjectionError
from . import composed, published
from .calls import call_job
from .config import read_config
from .findings import findings
from .plan import ParallelPlan, parse_plan
from .records import Answer, Arm, Request, read_answer
from .result import Projection, Range, Ratio, Row
from .routing import Routing, expected_routing, worst_routing
from .step import CallResult, DeviceStep, PartTimes, device_step, part_times
from .terms import load_terms, usable_hbm

OURS = "tpu_fused_experts"
ARMS = ("batched_mm", "grouped_mm", composed.NAME, OURS)
NO_EXPERTS = "none"
_PACKAGES = ("torch", "torch-tpu", "jax", "libtpu", "transformers", "tpu-kernels")
_TAIL = 2000


def project(
    model: str | Path,
    *,
    tpu: str = "v6e-8",
    parallel: str = "ep8",
    batches: Sequence[int] = (1, 8, 64),
    context: int = 1024,
    experts: Sequence[str] = ARMS,
    attention: Sequence[str] | None = None,
    timeout: float = analysis.compiler.DEFAULT_TIMEOUT,
    observe: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Projection:
    """Projects a decode step: how long it takes, where that goes, whether it fits, and what to fix.

    Nothing is downloaded but the config, and nothing is run: each kind of layer is exported from the meta device,
    compiled by the real TPU compiler, and its schedule followed by the simulator, Pallas kernels and XLA's ops alike.
    What chips exchange and what the host takes are stated terms. Results are cached by all that they depend on.

    Args:
        model: A Hub id, a folder with a config.json, or such a file.
        tpu: A slice, such as v6e-8.
        parallel: The parallel plan: tp1, ep8, tp8, tp4ep2.
        batches: Sequences that decode together.
        context: Keys that each sequence's cache has, all of them valid.
        experts: The arms: experts implementations of transformers or of this library, or `published`.
        attention: Attention implementations, each with all arms; unless given, `tpu_attention` with this library's
            experts and `sdpa` with others.
        timeout: Of each compile, in seconds.
        observe: Is told what goes on: what, how many are done, of how many.

    Raises:
        ProjectionError: The model, plan or TPU cannot be projected; the message says the way out.
        AnalysisError: The compiler is not installed or there is no such target.

    Example:
        >>> projection = project("Qwen/Qwen3-30B-A3B", batches=(64,))  # doctest: +SKIP
        >>> print(projection.rows[0].step_ms)  # doctest: +SKIP
    """
    target, plan = parse_target(tpu), parse_plan(parallel)
    _check(target, plan, batches, context)
    calibration = load_calibration(target.generation)
    config = read_config(model)
    arms = _arms(config, experts, attention)
    request = Request(
        config=config, tp=plan.tp, ep=plan.ep, arms=arms, batches=tuple(batches), context=context
    )
    key = cache.digest(request.model_dump(mode="json"), target.topology, _fingerprint(), _versions())
    kept = cache.read("project", key, Projection.model_validate_json)
    if kept is not None:
        return kept.model_copy(update={"model": str(model)})
    observe("exporting layers", 0, 1)
    with tempfile.TemporaryDirectory(prefix="tpu-kernels-project-") as folder:
        answer = _export(request, Path(folder))
        times = _times(answer, Path(folder), plan, target, calibration, timeout, observe)
    rows = tuple(
        _row(answer, arm, batch, times, plan, target, calibration, config)
        for batch in batches
        for arm in arms
    )
    terms = load_terms()
    compared = str(plan) == published.PLAN and target.topology == parse_target(published.TPU).topology
    content = published.load_published()
    comparisons = published.compare(config, rows) if compared else ()
    result = Projection(
        model=str(model),
        kind=answer.model,
        parameters=answer.parameters,
        tpu=tpu,
        generation=target.generation,
        parallel=str(plan),
        context=context,
        transformers=plan.transformers,
        usable_hbm_bytes=usable_hbm(target.generation),
        rows=rows,
        ratios=_ratios(rows, batches),
        comparisons=comparisons,
        published=f"{content['source']}; {content['setup']}" if comparisons else "",
        terms=tuple(term.source for term in (terms.interconnect, terms.hbm, terms.host)),
        error=_error(calibration),
        versions=_versions(),
    )
    cache.write("project", key, result.model_dump_json())
    return result


def _check(target: CompileTarget, plan: ParallelPlan, batches: Sequence[int], context: int) -> None:
    devices = target.devices
    if plan.chips > devices:
        raise ProjectionError(
            f"{plan} needs {plan.chips} devices, and {target.name} has {devices}; give a larger --tpu or a smaller plan"
        )
    if not batches or min(batches) < 1 or context < 1:
        raise ProjectionError(
            f"batches {list(batches)} and context {context} must be whole numbers of at least 1"
        )


def _arms(config: dict[str, Any], experts: Sequence[str], attention: Sequence[str] | None) -> tuple[Arm, ...]:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    if not any(config.get(name) for name in names):
        experts = (NO_EXPERTS,)
    pairs = [
        Arm(experts=name, attention=kind)
        for name in experts
        for kind in attention or (("tpu_attention",) if name.startswith("tpu_") else ("sdpa",))
    ]
    return tuple(dict.fromkeys(pairs))


def _export(request: Request, folder: Path) -> Answer:
    (folder / "request.json").write_text(request.model_dump_json(), encoding="utf-8")
    package_parent = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-P", "-m", f"{__package__}.worker", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )
    if done.returncode or not (folder / "answer.json").exists():
        raise ProjectionError(f"the model's layers cannot be exported: {_last(done.stderr)}")
    answer = read_answer(folder)
    if answer.error is not None:
        raise ProjectionError(answer.error)
    return answer


def _last(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1][:_TAIL] if lines else "the process said nothing"


def _times(
    answer: Answer,
    folder: Path,
    plan: ParallelPlan,
    target: CompileTarget,
    calibration: Calibration,
    timeout: float,
    observe: Callable[[str, int, int], None],
) -> dict[str, PartTimes]:
    """The times of all parts, by their file."""
    jobs: list[Job] = []
    places: dict[tuple[str, int, bool], int] = {}
    for part in answer.parts:
        module = (folder / part.file).read_bytes()
        fingerprint = hashlib.sha256(module).hexdigest()
        jobs.append(Job(Program(module, fingerprint, 1, {}, every_schedule=True), (), target.name))
        for number, call in enumerate(part.calls):
            expected, worst = _routings(answer, part.batch, plan)
            places[part.file, number, False] = len(jobs)
            places[part.file, number, True] = len(jobs) + 1
            jobs += [call_job(call, expected, target.name), call_job(call, worst, target.name)]
    done = 0

    def compiled(report: CompileReport) -> None:
        nonlocal done
        done += 1
        observe("compiling", done, len(jobs))

    reports = analysis.compile_many(jobs, timeout=timeout, on_report=compiled)
    pairs = list(zip(jobs, reports, strict=True))
    programs = [pair for pair in pairs if isinstance(pair[0].fn, Program)]
    times = {}
    for place, (part, (_, report)) in enumerate(zip(answer.parts, programs, strict=True)):
        observe("following schedules", place, len(answer.parts))
        results = {
            worst: [
                CallResult(call, *pairs[places[part.file, number, worst]])
                for number, call in enumerate(part.calls)
            ]
            for worst in (False, True)
        }
        times[part.file] = part_times(part, report, results[False], results[True], calibration)
    return times


def _routings(answer: Answer, batch: int, plan: ParallelPlan) -> tuple[Routing | None, Routing | None]:
    if answer.experts is None:
        return None, None
    sizes = (batch, answer.experts.top_k, answer.experts.count, plan.ep)
    return expected_routing(*sizes), worst_routing(*sizes)


def _row(
    answer: Answer,
    arm: Arm,
    batch: int,
    times: dict[str, PartTimes],
    plan: ParallelPlan,
    target: CompileTarget,
    calibration: Calibration,
    config: dict[str, Any],
) -> Row:
    reason = dict(answer.refused).get(arm)
    if reason is not None:
        return Row(arm=arm, batch=batch, not_projected=reason)
    step = device_step(answer, arm, batch, times, target.generation)
    device = Range(low=step.expected.low / 1e3, high=step.expected.high / 1e3)
    host = _host_ms(answer)
    worst_ms = max(step.worst_us / 1e3, device.high)
    step_ms = Range(low=device.low + host.low, high=worst_ms + host.high)
    return Row(
        arm=arm,
        batch=batch,
        floor_ms=_floor_ms(answer, step, batch, plan, calibration),
        device_ms=device,
        worst_ms=worst_ms,
        host_ms=host,
        step_ms=step_ms,
        tokens_per_s=Range(low=batch / step_ms.high * 1e3, high=batch / step_ms.low * 1e3),
        hbm_bytes=step.hbm_bytes,
        fits=step.hbm_bytes <= usable_hbm(target.generation),
        where={place: us / 1e3 for place, us in sorted(step.places.items(), key=lambda each: -each[1]) if us},
        findings=findings(answer, step, plan, batch, host.high),
    )


def _host_ms(answer: Answer) -> Range:
    """The host's part of a step: of a loop on the device, and of transformers' generate."""
    host = load_terms().host
    layers = sum(kind.count for kind in answer.layers)
    sliding = any(kind.window is not None for kind in answer.layers)
    # transformers compiles steps over sliding windows anew until torch gives up and runs them op by op.
    per_layer = host.op_by_op_us_per_layer if sliding else host.compiled_us_per_layer
    return Range(low=host.device_loop_us / 1e3, high=max(host.device_loop_us, per_layer * layers) / 1e3)


def _floor_ms(
    answer: Answer, step: DeviceStep, batch: int, plan: ParallelPlan, calibration: Calibration
) -> float:
    expected, _ = _routings(answer, batch, plan)
    active = expected.active / expected.local if expected else 0
    needed = float(answer.weights[""][0])
    for times, count in step.parts:
        if times.part.kind is not None:
            others, of_experts = answer.weights[times.part.kind]
            needed += (others + of_experts * active + times.part.cache_bytes) * count
    return needed / calibration.memory.nominal_gbps / 1e6


def _ratios(rows: tuple[Row, ...], batches: Sequence[int]) -> tuple[Ratio, ...]:
    found = []
    for batch in batches:
        arms = {row.arm.experts: row for row in rows if row.batch == batch and not row.not_projected}
        if not {OURS, composed.NAME} <= arms.keys():
            continue
        ours, theirs = arms[OURS], arms[composed.NAME]
        found.append(
            Ratio(
                batch=batch,
                device=_ratio(theirs.device_ms, ours.device_ms),
                with_generate=_ratio(theirs.device_ms, ours.device_ms, theirs.host_ms.high),
            )
        )
    return tuple(found)


def _ratio(theirs: Range, ours: Range, both: float = 0.0) -> Range:
    """At either bound: what hides, or does not, does so in both."""
    low, high = sorted(((theirs.low + both) / (ours.low + both), (theirs.high + both) / (ours.high + both)))
    return Range(low=low, high=high)


def _error(calibration: Calibration) -> float | None:
    records = sum(part.records for part in calibration.accuracy)
    weighted = sum(part.mean_error * part.records for part in calibration.accuracy)
    return weighted / records if records else None


def _versions() -> dict[str, str | None]:
    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {name.replace("-", "_"): version(name) for name in _PACKAGES}


def _fingerprint() -> str:
    """A hash of what a projection is made by: this package, the simulator, and the kernels that this release loads."""
    from .. import hub
    from ..analysis.simulator.fingerprint import simulator_fingerprint
    from ..integrations import attention, transformers

    found = hashlib.sha256(simulator_fingerprint().encode())
    for file in sorted(resources.files(__package__).iterdir(), key=lambda entry: entry.name):
        if file.name.endswith((".py", ".json")):
            found.update(file.name.encode() + b"\0" + file.read_bytes())
    for repository, version in (*transformers.EXPERTS_KERNELS, attention.KERNEL):
        build = hub.explain(repository, version=version).build
        if build is not None and build.metadata.digest is not None:
            found.update(json.dumps(dict(build.metadata.digest.files), sort_keys=True).encode())
    return found.hexdigest()
