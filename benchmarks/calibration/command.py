"""The command line: compile, fit, report."""

from __future__ import annotations

import typer

from benchmarks.calibration.programs import compile_records
from benchmarks.calibration.records import Record, load_records, select

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

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def _main() -> None:
    """Fits the simulator's constants on recorded times of real TPUs."""


@app.command()
def compile() -> None:
    """Compile the chosen records; needs tokamax 0.0.17."""

    def tell(record: Record, error: str | None) -> None:
        typer.echo(f"{record.generation} {record.family} {record.key}: {error or 'compiled'}")

    compile_records(chosen(), tell)


def chosen() -> list[Record]:
    """The records that take part."""
    return select((r for r in load_records() if r.plain), COUNTS)
