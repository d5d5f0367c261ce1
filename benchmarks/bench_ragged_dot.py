"""Our grouped matmul on the problems that others timed on real TPUs: forward and both gradients, and decode.

    python -m benchmarks.bench_ragged_dot --tpu v6e
    python -m benchmarks.bench_ragged_dot --tpu v5e,v5p,v6e,tpu7x --problems 8 --json rows.json

Ours is simulated; beside it the best time that is recorded of a peer (tokamax's two grouped matmuls, real TPUs,
benchmarks/calibration), and the floor: the larger of the operands' bytes at attainable bandwidth and the flops at the
published peak. A simulated time beside a measured one is off by the simulator's error; `bench_simulated` simulates the
peers too. Gradients in rows are products with the weights in the other layout, which is how they are recorded. Of
decode steps there are no records: only their floor is known.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.bench_simulated import GROUPED, describe, grouped_job, is_product, our_product
from benchmarks.calibration.records import Record, load_records, parse_shape
from tpu_kernels import analysis, get_kernel
from tpu_kernels.analysis.simulator.calibration import calibrated, load_calibration
from tpu_kernels.analysis.workload import kernel_cases, parse_workload
from tpu_kernels.errors import TpuKernelsError

DECODE_MODELS = ("qwen3-30b-a3b", "gemma-4-26b-a4b", "gpt-oss-20b")
DECODE = tuple(f"{model}:decode:{tokens}" for model in DECODE_MODELS for tokens in (1, 8, 64, 512))


@dataclasses.dataclass(frozen=True)
class Row:
    """A problem.

    Attributes:
        generation: v5e, v5p, v6e or tpu7x.
        kind: forward, weight gradient, or decode.
        problem: For people.
        floor_ms: What the machine allows.
        ours_ms: Simulated; None where it was not.
        error: Mean error of simulated times there.
        peer_ms: The best recorded time of a peer on a real TPU; None where there is no record.
        note: Why it was not run.
    """

    generation: str
    kind: str
    problem: str
    floor_ms: float
    ours_ms: float | None
    error: float | None
    peer_ms: float | None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is simulated, with what is known of it before."""

    kind: str
    name: str
    job: analysis.Job
    floor_ms: float | None
    peer_ms: float | None


def recorded(records: Iterable[Record], generation: str, most: int | None) -> list[Problem]:
    """The problems of the records, in bf16, each with the best time: `most` of each kind, spread over their sizes."""
    best: dict[str, Record] = {}
    for record in records:
        if record.generation != generation or record.family not in GROUPED or not record.plain:
            continue
        if any(parse_shape(record.arguments[name])[0] != "bf16" for name in ("lhs", "rhs")):
            continue
        key = record.shape
        if key not in best or record.median_ms < best[key].median_ms:
            best[key] = record
    kinds: dict[str, list[Record]] = defaultdict(list)
    for record in sorted(best.values(), key=lambda record: (record.median_ms, record.shape)):
        kinds["forward" if is_product(record) else "weight gradient"].append(record)
    return [_problem(kind, record) for kind, those in kinds.items() for record in spread(those, most)]


def spread(items: Sequence[Any], most: int | None) -> list[Any]:
    """At most so many of them, first and last among them where there is room for both."""
    if most is None or len(items) <= most:
        return list(items)
    step = (len(items) - 1) / max(most - 1, 1)
    return [items[round(place * step)] for place in range(most)]


def _problem(kind: str, record: Record) -> Problem:
    calibration = load_calibration(record.generation)
    floor = record.roofline_ms(peak_tflops=calibration.peak_tflops, gbps=calibration.memory.attainable_gbps)
    job = our_product(record) if kind == "forward" else _weight_gradient(record)
    return Problem(kind, describe(record), job, floor, record.median_ms)


def _weight_gradient(record: Record) -> analysis.Job:
    import jax

    ragged_dot = get_kernel("tpu-kernels/ragged-dot", version=1).ragged_dot
    groups = len(record.group_sizes())

    def weight_gradient(lhs: Any, gradient: Any, group_sizes: Any) -> Any:
        # (What is differentiated at does not enter the gradient of a product.)
        rhs = jax.numpy.zeros((groups, lhs.shape[1], gradient.shape[1]), lhs.dtype)

        def forward(rhs: Any) -> Any:
            return ragged_dot.jax_fn(lhs, rhs, group_sizes, tpu=record.generation, interpret=False)

        return jax.vjp(forward, rhs)[1](gradient)[0]

    return grouped_job(record, weight_gradient)


def decode(generation: str, workloads: Iterable[str]) -> list[Problem]:
    """Both products of decode steps; their floor is that of the simulated traffic's least."""
    kernel = get_kernel("tpu-kernels/ragged-dot", version=1)
    return [
        Problem("decode", case.name, case.job, None, None)
        for workload in map(parse_workload, workloads)
        for case in kernel_cases(kernel, workload, tpu=generation, op="ragged_dot")
    ]


def simulated(problem: Problem, generation: str) -> Row:
    """The row of a problem."""
    row = Row(
        generation, problem.kind, problem.name, problem.floor_ms or math.nan, None, None, problem.peer_ms
    )
    try:
        [profile] = analysis.simulate_many([problem.job], workers=1, timeout=900)
    except TpuKernelsError as error:
        return dataclasses.replace(row, note=f"not run: {str(error).splitlines()[0][:120]}")
    floor = problem.floor_ms
    if floor is None:
        roofline = profile.roofline
        floor = max(roofline.compute_ms, roofline.memory_ms)
    time_ms = profile.time_ms + profile.xla_ms
    return dataclasses.replace(row, ours_ms=time_ms, error=profile.error, floor_ms=floor)


def faster(rows: Iterable[Row]) -> float | None:
    """By what factor ours is faster than the best recorded peer, in the geometric mean."""
    factors = [math.log(row.peer_ms / row.ours_ms) for row in rows if row.peer_ms and row.ours_ms]
    return math.exp(sum(factors) / len(factors)) if factors else None


def table(generation: str, rows: Sequence[Row]) -> Table:
    """A generation's."""
    error = next((row.error for row in rows if row.error is not None), None)
    within = f"mean error {error:.1%}" if error is not None else "error unknown"
    grid = Table(
        title=f"ragged-dot on {generation}: ours simulated ({within}); peers as others measured them"
    )
    for name in ("kind", "problem"):
        grid.add_column(name)
    for name in ("floor ms", "ours ms", "over the floor", "best peer ms", "faster by"):
        grid.add_column(name, justify="right")
    grid.add_column("note")
    for row in rows:
        ours = row.ours_ms
        grid.add_row(
            row.kind,
            row.problem,
            f"{row.floor_ms:.4g}",
            f"{ours:.4g}" if ours else "",
            f"{ours / row.floor_ms:.2f}x" if ours else "",
            f"{row.peer_ms:.4g}" if row.peer_ms else "",
            f"{row.peer_ms / ours:.2f}x" if row.peer_ms and ours else "",
            row.note,
        )
    mean = faster(rows)
    slower = [row for row in rows if row.peer_ms and row.ours_ms and row.ours_ms > 1.02 * row.peer_ms]
    if mean is not None:
        grid.caption = (
            f"{mean:.2f}x faster in the geometric mean; slower than 1.02x the best peer: {len(slower)}"
        )
    return grid


def main(
    tpu: Annotated[str, typer.Option(help="Generations, comma-separated.")] = ",".join(calibrated()),
    most: Annotated[int | None, typer.Option("--problems", help="Of each kind; all unless given.")] = None,
    steps: Annotated[bool, typer.Option("--decode/--no-decode", help="Decode steps as well.")] = True,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Simulate our grouped matmul on recorded problems."""
    records = load_records()
    console = Console(width=None if Console().is_terminal else 180)
    rows: list[Row] = []
    for generation in (name.strip() for name in tpu.split(",")):
        problems = recorded(records, generation, most)
        if steps:
            problems += decode(generation, DECODE)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            here = [simulated(each, generation) for each in progress.track(problems, description=generation)]
        console.print(table(generation, here))
        rows += here
        if as_json is not None:
            as_json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    typer.run(main)
