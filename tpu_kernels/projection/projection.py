"""`project`: a model's decode step on a TPU slice, from its config alone."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import analysis
from ..analysis import CompileReport, Job, cache
from ..analysis.compiler import DEFAULT_TIMEOUT
from ..analysis.export import Program
from ..analysis.simulator.calibration import Calibration, load_calibration
from ..analysis.target import CompileTarget, parse_target
from ..errors import AnalysisError, ProjectionError
from ..packages import computing_versions
from . import published
from .calls import call_job
from .config import read_config
from .fingerprint import fingerprint
from .plan import ParallelPlan, parse_plan
from .process import export_in_process
from .records import PUBLISHED, Answer, Arm, Request
from .result import Projection
from .rows import OURS, make_ratios, make_row, routings
from .step import CallResult, PartTimes, part_times
from .terms import load_terms, usable_hbm

ARMS = ("batched_mm", "grouped_mm", PUBLISHED, OURS)
NO_EXPERTS = "none"


def project(
    model: str | Path,
    *,
    tpu: str = "v6e-8",
    parallel: str = "ep8",
    batches: Sequence[int] = (1, 8, 64),
    context: int = 1024,
    experts: Sequence[str] = ARMS,
    attention: Sequence[str] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
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
    key = cache.digest(request.model_dump(mode="json"), target.topology, fingerprint(), computing_versions())
    kept = cache.read("project", key, Projection.model_validate_json)
    if kept is not None:
        return kept.model_copy(update={"model": str(model)})
    observe("exporting layers", 0, 1)
    with tempfile.TemporaryDirectory(prefix="tpu-kernels-project-") as folder:
        answer = export_in_process(request, Path(folder))
        times = _times(answer, Path(folder), plan, target, calibration, timeout, observe)
    rows = tuple(
        make_row(answer, arm, batch, times, plan, target, calibration) for batch in batches for arm in arms
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
        ratios=make_ratios(rows, batches),
        comparisons=comparisons,
        published=f"{content['source']}; {content['setup']}" if comparisons else "",
        terms=tuple(term.source for term in (terms.interconnect, terms.hbm, terms.host)),
        error=calibration.mean_error,
        versions=computing_versions(),
    )
    # A compiler that crashed or took too long may do better the next time.
    if not any(isinstance(each, str) for each in times.values()):
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


def _times(
    answer: Answer,
    folder: Path,
    plan: ParallelPlan,
    target: CompileTarget,
    calibration: Calibration,
    timeout: float,
    observe: Callable[[str, int, int], None],
) -> dict[str, PartTimes | str]:
    """The times of all parts, by their file; or why there are none."""
    jobs: list[Job] = []
    places: dict[tuple[str, int, bool], int] = {}
    for part in answer.parts:
        module = (folder / part.file).read_bytes()
        fingerprint = hashlib.sha256(module).hexdigest()
        jobs.append(Job(Program(module, fingerprint, 1, {}, every_schedule=True), (), target.name))
        for number, call in enumerate(part.calls):
            expected, worst = routings(answer, part.batch, plan)
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
    times: dict[str, PartTimes | str] = {}
    for place, (part, (_, report)) in enumerate(zip(answer.parts, programs, strict=True)):
        observe("following schedules", place, len(answer.parts))
        results = {
            worst: [
                CallResult(call, *pairs[places[part.file, number, worst]])
                for number, call in enumerate(part.calls)
            ]
            for worst in (False, True)
        }
        try:
            times[part.file] = part_times(part, report, results[False], results[True], calibration)
        except AnalysisError as error:
            times[part.file] = str(error)
    return times
