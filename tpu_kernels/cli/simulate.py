"""`tpu-kernels simulate`: how long a kernel takes on TPUs in real models, and why, without a TPU."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from .. import analysis, hub
from ..analysis import cache
from ..analysis.target import parse_target
from ..errors import AnalysisError
from .cases import CASE_HELP, KernelArgument, load_cases, repository

if TYPE_CHECKING:
    from ..analysis.simulator import Profile


def simulate(
    kernel: KernelArgument,
    case: Annotated[list[str], typer.Option(help=CASE_HELP)],
    op: Annotated[str | None, typer.Option(help="An op of the kernel; its first unless given.")] = None,
    tpu: Annotated[
        str, typer.Option(help="Generations (v5e, v5p, v6e, tpu7x) or slices (v6e-8), comma-separated.")
    ] = "v6e",
    version: Annotated[
        int | None, typer.Option(help="The kernel's version; the newest unless given.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that each compile may take.")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profiles as JSON.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the timeline here, for https://ui.perfetto.dev; of one call only."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a roofline chart here, as a PNG.")] = None,
) -> None:
    """Simulate an op of a kernel in models' layers, from the compiler's final schedule.

    Example: tpu-kernels simulate ragged-dot --tpu v6e --case qwen3-30b-a3b:decode:64
    """
    targets = [name.strip() for name in tpu.split(",")]
    for target in targets:
        parse_target(target)
    if plot is not None:
        from ..analysis.simulator.plot import check_available

        check_available()
    key = _key(kernel, version, case, targets, op)
    profiles = None if trace is not None or key is None else cache.read("simulate", key, _from_json)
    if profiles is None:
        profiles = _simulated(kernel, version, case, targets, op, timeout)
        if key is not None:
            cache.write("simulate", key, _to_json(profiles))
    if trace is not None:
        if len(profiles) > 1:
            names = ", ".join(profile.function for profile in profiles)
            raise AnalysisError(
                f"--trace is of one call, and there are {len(profiles)} ({names}); the timelines of several are "
                f"written by Profile.write_trace"
            )
        profiles[0].write_trace(trace)
    if plot is not None:
        from ..analysis.simulator.plot import draw_rooflines

        plot.write_bytes(draw_rooflines(profiles))
    if as_json:
        typer.echo(_to_json(profiles))
        return
    # Off a terminal rich assumes 80 columns, and what goes to a log file would be folded for nothing.
    console = Console(width=None if sys.stdout.isatty() else 140, emoji=False)
    for profile in profiles:
        console.print(str(profile), markup=False, highlight=False, soft_wrap=True)


def _simulated(
    kernel: str, version: int | None, names: list[str], targets: list[str], op: str | None, timeout: float
) -> list[Profile]:
    cases = load_cases(kernel, version, names, targets, op)
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("compiling", total=len(cases))
        profiles = analysis.simulate_many(
            [case.job for case in cases], timeout=timeout, on_report=lambda report: progress.advance(task)
        )
    return [
        dataclasses.replace(profile, function=f"{case.op} {case.name}")
        for case, profile in zip(cases, profiles, strict=True)
    ]


def _key(
    kernel: str, version: int | None, names: list[str], targets: list[str], op: str | None
) -> str | None:
    """Names what the command would compute; None where the kernel's files are not known by their digests.

    Made without loading the kernel, so that what is known already is told at once.
    """
    build = hub.explain(repository(kernel), version=version).build
    if build is None or build.metadata.digest is None:
        return None
    from ..analysis.simulator.fingerprint import simulator_fingerprint

    return cache.digest(simulator_fingerprint(), dict(build.metadata.digest.files), names, targets, op)


def _to_json(profiles: list[Profile]) -> str:
    return json.dumps([json.loads(profile.to_json()) for profile in profiles], indent=2)


def _from_json(text: str) -> list[Profile]:
    from ..analysis.simulator import Profile

    return [Profile.from_json(json.dumps(values)) for values in json.loads(text)]
