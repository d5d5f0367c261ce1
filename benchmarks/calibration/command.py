"""The command line: compile, fit, report."""

from __future__ import annotations

import importlib.resources
import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import typer

from benchmarks.calibration.fitting import Subject, fit, load_subjects, loss
from benchmarks.calibration.programs import compile_records, load_program
from benchmarks.calibration.records import FAMILIES, Record, load_records, select
from tpu_kernels.analysis.simulator.calibration import (
    Accuracy,
    Calibration,
    calibrated,
    load_calibration,
)

# How many records are compiled, in the order of `select`; a compile takes seconds. All of v5e's are.
COUNTS = {
    ("v5e", "grouped matmul v1"): 16,
    ("v6e", "grouped matmul v1"): 30,
    ("v5p", "grouped matmul v1"): 20,
    ("tpu7x", "grouped matmul v1"): 30,
    ("v6e", "grouped matmul v2"): 16,
    ("v5p", "grouped matmul v2"): 10,
    ("tpu7x", "grouped matmul v2"): 16,
    ("tpu7x", "splash attention"): 16,
}

# What is fitted. The clocks and the cycles of a multiply are such that they give the published peak, but for TPU7x,
# whose records ran slower than that: its clock is fitted, and a multiply takes as many cycles as on v6e.
CONSTANTS = ("memory.latency_ns", "memory.attainable_gbps", "op_us", "matrix.push_cycles")
MORE_CONSTANTS = {"tpu7x": ("clock_ghz",)}

PROVENANCE = (
    "fitted on half of the problems in benchmarks/calibration/tpu_timings.jsonl (autotuning records of tokamax "
    "0.0.17, Apache-2.0); accuracy is of the other half"
)
NEAR = 0.03  # a choice that costs no more than this is as good as the best

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def _main() -> None:
    """Fits the simulator's constants on recorded times of real TPUs."""


@app.command("compile")
def compile_chosen() -> None:
    """Compile the chosen records; needs tokamax 0.0.17. What is compiled already stays."""

    def tell(record: Record, error: str | None) -> None:
        typer.echo(f"{record.generation} {record.family} {record.key}: {error or 'compiled'}")

    compile_records(chosen(), tell)


@app.command("fit")
def fit_generations(generation: list[str] | None = None) -> None:
    """Fit the constants, of all generations unless some are given, and write them into the package."""
    for name in generation or calibrated():
        subjects = _subjects(name)
        fitted = [subject for subject in subjects if subject.record.fitted]
        calibration = load_calibration(name)
        typer.echo(f"{name}: loss {loss(fitted, calibration):.4f} over {len(fitted)} records")
        calibration = fit(
            fitted,
            calibration,
            (*CONSTANTS, *MORE_CONSTANTS.get(name, ())),
            on_step=lambda constant, value, found: typer.echo(f"  {constant} {value:.4g}: {found:.4f}"),
        )
        _write(_rounded(calibration, subjects))


@app.command()
def report(
    table: Path = Path("docs/calibration.md"), plot: Path = Path("docs/images/calibration.png")
) -> None:
    """Write how well the package's constants do: a table and a scatter plot."""
    from benchmarks.calibration.reporting import draw, write_table

    subjects = {name: _subjects(name) for name in calibrated()}
    table.write_text(write_table(subjects, ranking(subjects)))
    plot.parent.mkdir(parents=True, exist_ok=True)
    plot.write_bytes(draw(subjects))


def chosen(generation: str | None = None) -> list[Record]:
    """The records that take part."""
    counts = {key: count for key, count in COUNTS.items() if generation in (None, key[0])}
    return select((record for record in load_records() if record.plain), counts)


def ranking(subjects: dict[str, list[Subject]]) -> dict[str, tuple[int, int]]:
    """By generation, how often the simulated best of several ways to one result is near the measured best.

    The ways are configurations and versions of a kernel. Returns hits and problems.
    """
    found = {}
    for name, those in subjects.items():
        calibration = load_calibration(name)
        ways: dict[str, list[Subject]] = defaultdict(list)
        for subject in those:
            arguments = subject.record.arguments
            ways[json.dumps([arguments, subject.record.family.split(" v")[0]], sort_keys=True)].append(
                subject
            )
        several = [group for group in ways.values() if len(group) > 1]
        hits = 0
        for group in several:
            best = min(group, key=lambda subject: subject.simulated_ms(calibration))
            fastest = min(subject.record.median_ms for subject in group)
            hits += best.record.median_ms <= fastest * (1 + NEAR)
        found[name] = hits, len(several)
    return found


def _subjects(generation: str) -> list[Subject]:
    def tell(record: Record, error: str) -> None:
        typer.echo(f"{record.generation} {record.family} {record.key} is left out: {error}", err=True)

    return load_subjects(chosen(generation), load_calibration(generation), tell)


def _rounded(calibration: Calibration, subjects: Sequence[Subject]) -> Calibration:
    """With constants of three digits, and what they are worth."""
    memory, matrix = (
        part.model_copy(
            update={
                name: _three_digits(value)
                for name, value in part.model_dump().items()
                if isinstance(value, float)
            }
        )
        for part in (calibration.memory, calibration.matrix)
    )
    calibration = calibration.model_copy(
        update={
            "memory": memory,
            "matrix": matrix,
            "op_us": _three_digits(calibration.op_us),
            "clock_ghz": _three_digits(calibration.clock_ghz),
        }
    )
    versions = Counter(
        program.versions["libtpu"] for s in subjects if (program := load_program(s.record)) is not None
    )
    accuracy = []
    for family in FAMILIES.values():
        held = [s for s in subjects if not s.record.fitted and s.record.family == family]
        if held:
            errors = [abs(s.error(calibration)) for s in held]
            rooflines = [abs(s.roofline_error(calibration)) for s in held]
            accuracy.append(
                Accuracy(
                    kernels=family,
                    records=len(held),
                    mean_error=round(sum(errors) / len(errors), 4),
                    largest_error=round(max(errors), 4),
                    roofline_error=round(sum(rooflines) / len(rooflines), 4),
                )
            )
    return calibration.model_copy(
        update={
            "libtpu": versions.most_common(1)[0][0],
            "accuracy": tuple(accuracy),
            "provenance": PROVENANCE,
        }
    )


def _three_digits(value: float) -> float:
    return round(value, 2 - math.floor(math.log10(abs(value)))) if value else value


def _write(calibration: Calibration) -> None:
    folder = importlib.resources.files("tpu_kernels.analysis.simulator") / "calibrations"
    path = Path(str(folder)) / f"{calibration.generation}.json"
    path.write_text(calibration.model_dump_json(indent=2) + "\n")
    load_calibration.cache_clear()
