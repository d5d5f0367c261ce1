"""`tpu-kernels tune`: the fastest configs of a kernel for models' layers, written where the kernel finds them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..analysis.target import parse_target
from ..analysis.workload import benchmark_cases
from ..authoring.project import CONFIG_FILE
from .cases import CASE_HELP, KernelArgument, load_kernel

if TYPE_CHECKING:
    from ..tuning import Subject, Task, Trial, Tuned

DEFAULT_CASES = tuple(
    f"qwen3-30b-a3b:{phase}" for phase in ("decode:8", "decode:64", "decode:512", "prefill:8192")
)


def tune(
    kernel: KernelArgument,
    case: Annotated[
        list[str] | None, typer.Option("--case", "--cases", help=f"{CASE_HELP} Comma-separated, too.")
    ] = None,
    tpu: Annotated[str, typer.Option(help="Generations (v5e, v5p, v6e, tpu7x), comma-separated.")] = "v6e",
    op: Annotated[str | None, typer.Option(help="An op of the kernel; its first unless given.")] = None,
    version: Annotated[
        int | None, typer.Option(help="The kernel's version; the newest unless given.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Candidates tried for each problem.")] = 8,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one a core unless given.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that each compile may take.")] = 300.0,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure on the TPU of this machine in place of simulating.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the tables; the kernel's source if KERNEL is one, else the user's cache, where the loaded "
            "kernel finds them."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Search for the fastest configs of a kernel, and write them into its tables. May be interrupted and resumed.

    KERNEL may also be the folder of a kernel's source: then the tables become part of it.

    Example: tpu-kernels tune ragged-dot --tpu v5e,v6e --case qwen3-30b-a3b:decode:64
    """
    # It imports torch, which other commands need not wait for.
    from .. import tuning

    targets = [name.strip() for name in tpu.split(",")]
    generations = [parse_target(name).generation for name in targets]
    with _subject(kernel, version) as subject:
        own = [each.name for each in benchmark_cases(subject.module, tpu=targets[0])]
        names = [name.strip() for given in case or own or DEFAULT_CASES for name in given.split(",")]
        tasks = tuning.find_tasks(subject, names, targets, op=op)
        tables: dict[str, Path] = {g: out / f"{g}.json" if out else subject.table(g) for g in generations}
        console = Console(stderr=True)
        with _Bar(console, sum(min(limit, len(task.problem.candidates(task.tpu))) for task in tasks)) as bar:

            def keep(tuned: Tuned) -> None:
                tuning.write_table(tables[tuned.task.tpu], [tuned])

            found = tuning.tune(
                subject,
                tasks,
                limit=limit,
                workers=workers,
                timeout=timeout,
                evidence="measured" if measure else "simulated",
                on_trial=bar.advance,
                on_tuned=keep,
            )
    if as_json:
        typer.echo(json.dumps([_as_json(tuned) for tuned in found], indent=2))
    else:
        # Off a terminal rich assumes 80 columns, and what goes to a log file would be folded for nothing.
        printed = Console(width=None if sys.stdout.isatty() else 180, emoji=False)
        printed.print(_table(found))
        for line in _summary(found):
            printed.print(line, markup=False, highlight=False, soft_wrap=True)
        for path in tables.values():
            printed.print(f"written to {path}", markup=False, highlight=False, soft_wrap=True)
    if any(tuned.best is None for tuned in found):
        raise typer.Exit(1)


def _subject(kernel: str, version: int | None) -> contextlib.AbstractContextManager[Subject]:
    from .. import tuning

    source = Path(kernel)
    if (source / CONFIG_FILE).is_file():
        return tuning.built_source(source)
    return tuning.loaded_kernel(load_kernel(kernel, version))


class _Bar:
    """Progress, with the best time of the problem that a trial was of."""

    def __init__(self, console: Console, total: int) -> None:
        columns = (
            TextColumn("tuning"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._bar = self._progress.add_task("", total=total)
        self._best: dict[tuple[object, str], float] = {}

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def advance(self, task: Task, trial: Trial) -> None:
        key = (task.problem, task.tpu)
        best = min(self._best.get(key, math.inf), trial.time_ms or math.inf)
        self._best[key] = best
        self._progress.update(self._bar, advance=1, description=f"{task.tpu} {task}: best {best:.4g} ms")


def _as_json(tuned: Tuned) -> dict[str, object]:
    task = tuned.task
    return {
        "tpu": task.tpu,
        "operation": task.problem.operation,
        "dimensions": dict(task.problem.dimensions),
        "variant": dict(task.problem.variant),
        "cases": list(task.cases),
        "evidence": tuned.evidence,
        "best": None if tuned.best is None else dataclasses.asdict(tuned.best),
        "gain": tuned.gain,
        "trials": [dataclasses.asdict(trial) for trial in tuned.trials],
    }


def _table(found: list[Tuned]) -> Table:
    table = Table(
        title=f"{found[0].evidence}, not measured" if found[0].evidence == "simulated" else "measured"
    )
    for name in ("target", "case", "problem"):
        table.add_column(name)
    for name in ("heuristic ms", "best ms", "faster", "tried", "failed"):
        table.add_column(name, justify="right")
    for tuned in found:
        best, gain = tuned.best, tuned.gain
        failed = sum(trial.time_ms is None for trial in tuned.trials)
        more = f" and {len(tuned.task.cases) - 1} more" if len(tuned.task.cases) > 1 else ""
        table.add_row(
            tuned.task.tpu,
            tuned.task.cases[0] + more,
            str(tuned.task),
            _milliseconds(tuned.heuristic.time_ms),
            _milliseconds(best.time_ms if best else None),
            "" if gain is None else f"{gain:.1%}",
            str(len(tuned.trials)),
            str(failed or ""),
        )
    return table


def _milliseconds(time_ms: float | None) -> str:
    return "failed" if time_ms is None else f"{time_ms:.4g}"


def _summary(found: list[Tuned]) -> list[str]:
    lines = []
    for generation in dict.fromkeys(tuned.task.tpu for tuned in found):
        those = [tuned for tuned in found if tuned.task.tpu == generation]
        gains = [tuned.gain for tuned in those if tuned.gain is not None]
        if gains:
            mean = math.exp(sum(math.log1p(gain) for gain in gains) / len(gains)) - 1
            better = sum(gain > 0 for gain in gains)
            lines.append(
                f"{generation}: {better} of {len(those)} faster than the heuristic, {mean:.1%} in the mean"
            )
    failures = {trial.failure for tuned in found for trial in tuned.trials if trial.failure}
    return [*lines, *(f"failed: {failure.splitlines()[0][:400]}" for failure in sorted(failures)[:5])]
