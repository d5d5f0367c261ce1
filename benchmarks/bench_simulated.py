"""Our grouped matmul and others', simulated side by side; beside them the times that others measured on real TPUs.

    python -m benchmarks.bench_simulated --tpu v6e --problems 3
    PYTHONPATH=<folder with tokamax> python -m benchmarks.bench_simulated --json tokamax.json
    python -m benchmarks.bench_simulated --add tokamax.json

Problems are those of recorded times (`benchmarks/calibration`). tokamax runs with the configuration that was the
fastest in the records, jax's megablox with the tiles of tokamax's first version, whose algorithm is the same, jax's
attention with blocks of 512. tokamax 0.0.12 has the first version of its grouped matmul, 0.0.17 (Python 3.12) also the
second; what is not installed is reported as not run, and `--add` brings in the rows of a run in another environment.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.calibration.programs import record_job
from benchmarks.calibration.records import Record, load_records, parse_shape
from tpu_kernels import analysis
from tpu_kernels.analysis.simulator.calibration import calibrated
from tpu_kernels.analysis.target import GENERATIONS
from tpu_kernels.errors import TpuKernelsError

DTYPES = {"bf16": "bfloat16", "f32": "float32"}
GROUPED = ("grouped matmul v1", "grouped matmul v2")
ATTENTION = "splash attention"
ATTENTION_BLOCK = 512
OURS = "tpu-kernels ragged-dot"


@dataclasses.dataclass(frozen=True)
class Row:
    """A kernel on a problem.

    Attributes:
        generation: v5e, v5p, v6e or tpu7x.
        problem: For people.
        kernel: Whose.
        simulated_ms: None where it was not run.
        recorded_ms: What others measured for this kernel on this problem; None where nobody did.
        note: Why it was not run, or with which versions it was.
    """

    generation: str
    problem: str
    kernel: str
    simulated_ms: float | None
    recorded_ms: float | None
    note: str


@dataclasses.dataclass(frozen=True)
class Contender:
    """A kernel to be run on a problem: `make` gives the job, or raises where that cannot be."""

    record: Record
    kernel: str
    make: Callable[[], analysis.Job]
    recorded_ms: float | None = None


def problems(records: Iterable[Record], generation: str, families: Sequence[str]) -> list[list[Record]]:
    """The recorded problems of a generation, each with its fastest record of each family.

    Products with matrices in bf16 only, and no gradients of weights; those that several families were measured on come
    first, then by size.
    """
    best: dict[str, dict[str, Record]] = {}
    for record in records:
        usable = record.generation == generation and record.family in families and record.plain
        if not usable or (record.family in GROUPED and not is_product(record)):
            continue
        known = best.setdefault(record.shape, {})
        if record.family not in known or record.median_ms < known[record.family].median_ms:
            known[record.family] = record

    def order(those: dict[str, Record]) -> tuple[int, float, str]:
        first = next(iter(those.values()))
        return -len(those), first.median_ms, first.shape

    return [list(those.values()) for those in sorted(best.values(), key=order)]


def is_product(record: Record) -> bool:
    """Whether it is of rows and weights in bf16, and no gradient in the weights."""
    (kind, lhs), (_, rhs) = (parse_shape(record.arguments[name]) for name in ("lhs", "rhs"))
    return kind == "bf16" and len(lhs) == 2 and len(rhs) == 3


def contenders(measured: Sequence[Record]) -> list[Contender]:
    """The kernels for a problem, given its records."""
    first = measured[0]
    recorded = [
        Contender(
            record, f"tokamax, {record.family}", lambda record=record: record_job(record), record.median_ms
        )
        for record in measured
    ]
    if first.family == ATTENTION:
        return [*recorded, Contender(first, "jax, splash attention", lambda: _jax_attention(first))]
    tiled = [record for record in measured if record.family == GROUPED[0]]
    return [
        Contender(first, OURS, lambda: our_product(first)),
        *recorded,
        *(Contender(record, "jax, megablox", lambda record=record: _megablox(record)) for record in tiled),
    ]


def _arrays(record: Record, *names: str) -> list[Any]:
    import jax

    shapes = [parse_shape(record.arguments[name]) for name in names]
    return [jax.ShapeDtypeStruct(axes, DTYPES[kind]) for kind, axes in shapes]


def is_transposed(record: Record) -> bool:
    """Whether the weights are stored as [groups, N, K]."""
    contracting, _ = record.arguments["ragged_dot_dimension_numbers"]["dot_dimension_numbers"]
    return contracting == [[1], [2]]


def grouped_job(record: Record, function: Any, **static: Any) -> analysis.Job:
    """A function of a record's matrices and group sizes, on these."""
    import jax

    sizes = record.group_sizes()
    arrays = [*_arrays(record, "lhs", "rhs"), jax.ShapeDtypeStruct((len(sizes),), "int32")]
    return analysis.Job(function, tuple(arrays), record.generation, static, {"group_sizes": sizes})


def our_product(record: Record) -> analysis.Job:
    """A record's product by `ragged_dot`."""
    from tpu_kernels import get_kernel

    kernel = get_kernel("tpu-kernels/ragged-dot", version=1)
    return grouped_job(record, kernel.ragged_dot, transpose_rhs=is_transposed(record))


def _megablox(record: Record) -> analysis.Job:
    from jax.experimental.pallas.ops.tpu import megablox

    tiles = tuple(record.config[f"tile_{axis}"] for axis in "mkn")
    (_, (m, _)) = parse_shape(record.arguments["lhs"])
    if m % tiles[0]:
        raise ValueError(f"its rows, {m}, must be a multiple of the tile, {tiles[0]}")

    def gmm(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
        return megablox.gmm(
            lhs, rhs, group_sizes, lhs.dtype, tiling=tiles, transpose_rhs=is_transposed(record)
        )

    return grouped_job(record, gmm)


def _jax_attention(record: Record) -> analysis.Job:
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    (_, (heads, length, _)), (_, (_, keys, _)) = (parse_shape(record.arguments[name]) for name in ("q", "k"))
    causal = record.arguments["mask"]["is_causal"]
    one = splash_attention_mask.CausalMask if causal else splash_attention_mask.FullMask
    blocks = splash_attention_kernel.BlockSizes(
        block_q=min(ATTENTION_BLOCK, length),
        block_kv=min(ATTENTION_BLOCK, keys),
        block_kv_compute=min(ATTENTION_BLOCK, keys),
    )
    make = (
        splash_attention_kernel.make_splash_mqa
        if record.arguments["is_mqa"]
        else splash_attention_kernel.make_splash_mha
    )
    attention = make(
        splash_attention_mask.MultiHeadMask([one((length, keys))] * heads),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
    )
    arrays = tuple(_arrays(record, "q", "k", "v"))
    return analysis.Job(lambda q, k, v: attention(q, k, v), arrays, record.generation)


def simulated(contender: Contender) -> Row:
    """The row of a contender."""
    record = contender.record
    row = Row(record.generation, describe(record), contender.kernel, None, contender.recorded_ms, "")
    try:
        job = contender.make()
        [profile] = analysis.simulate_many([job], workers=1)
    except ModuleNotFoundError as error:
        return dataclasses.replace(row, note=f"not run: {error.name} is not installed")
    except (TpuKernelsError, ValueError, TypeError, NotImplementedError) as error:
        return dataclasses.replace(row, note=f"not run: {str(error).splitlines()[0][:120]}")
    return dataclasses.replace(row, simulated_ms=profile.time_ms, note=_versions(contender.kernel))


def describe(record: Record) -> str:
    """A problem, for people."""
    if record.family == ATTENTION:
        (_, (heads, length, width)), (_, keys) = (parse_shape(record.arguments[name]) for name in ("q", "k"))
        causal = "causal" if record.arguments["mask"]["is_causal"] else "full"
        return f"attention {heads} x {length} x {keys[1]} x {width}, {causal}"
    (_, (m, k)), (_, rhs) = (parse_shape(record.arguments[name]) for name in ("lhs", "rhs"))
    sizes = record.group_sizes()
    transposed = is_product(record) and is_transposed(record)
    n = rhs[1] if transposed else rhs[-1]
    active = sum(size > 0 for size in sizes)
    return f"M{m} K{k} N{n} G{len(sizes)} ({active} active){', transposed' if transposed else ''}"


def _versions(kernel: str) -> str:
    names = ["jax", *(["tokamax"] if kernel.startswith("tokamax") else [])]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def table(rows: Sequence[Row]) -> Table:
    """All rows, a problem's together, with what ours is faster by."""
    grid = Table(
        title="simulated: nothing was run on a TPU here; recorded: others' autotuning records of real TPUs"
    )
    for name in ("TPU", "problem", "kernel"):
        grid.add_column(name)
    for name in ("simulated ms", "recorded ms", "ours faster by"):
        grid.add_column(name, justify="right")
    grid.add_column("note")
    ours = {(row.generation, row.problem): row.simulated_ms for row in rows if row.kernel == OURS}
    order = {key: place for place, key in enumerate(dict.fromkeys((r.generation, r.problem) for r in rows))}
    last = None
    for row in sorted(rows, key=lambda row: order[row.generation, row.problem]):
        key = (row.generation, row.problem)
        if last not in (None, key):
            grid.add_section()
        own = ours.get(key)
        faster = f"{row.simulated_ms / own:.2f}x" if own and row.simulated_ms and row.kernel != OURS else ""
        grid.add_row(
            row.generation,
            row.problem if key != last else "",
            row.kernel,
            "" if row.simulated_ms is None else f"{row.simulated_ms:.4g}",
            "" if row.recorded_ms is None else f"{row.recorded_ms:.4g}",
            faster,
            row.note,
        )
        last = key
    return grid


def merged(rows: Sequence[Row], more: Sequence[Row]) -> list[Row]:
    """Both, where one was run in place of one that was not."""
    found: dict[tuple[str, str, str], Row] = {}
    for row in (*rows, *more):
        key = (row.generation, row.problem, row.kernel)
        if key not in found or found[key].simulated_ms is None:
            found[key] = row
    return list(found.values())


def main(
    tpu: Annotated[str, typer.Option(help="Generations, comma-separated.")] = ",".join(calibrated()),
    count: Annotated[int, typer.Option("--problems", help="Grouped matmuls for each generation.")] = 1,
    attention: Annotated[int, typer.Option(help="Attentions for each generation.")] = 0,
    add: Annotated[list[Path] | None, typer.Option(help="What --json wrote in another environment.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Simulate recorded problems with our kernel and with others'."""
    generations = [name.strip() for name in tpu.split(",")]
    if unknown := set(generations) - set(GENERATIONS):
        raise typer.BadParameter(f"there is no generation {', '.join(sorted(unknown))}")
    records = load_records()
    chosen = [
        contender
        for generation in generations
        for families, most in ((GROUPED, count), ((ATTENTION,), attention))
        for problem in problems(records, generation, families)[:most]
        for contender in contenders(problem)
    ]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        rows = [simulated(each) for each in progress.track(chosen, description="simulating")]
    for path in add or ():
        rows = merged(rows, [Row(**values) for values in json.loads(path.read_text())])
    if as_json is not None:
        as_json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    Console(width=None if Console().is_terminal else 200).print(table(rows))


if __name__ == "__main__":
    typer.run(main)
