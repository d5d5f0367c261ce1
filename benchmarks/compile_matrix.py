"""The compile matrix: every shipped kernel, for every generation that it claims, in its cases of real models.

`make matrix`, or python -m benchmarks.compile_matrix. With the cache (`TPU_KERNELS_CACHE`) only what changed is
compiled.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tpu_kernels import get_kernel
from tpu_kernels.analysis import CompileReport, compile_many
from tpu_kernels.analysis.sizes import format_bytes
from tpu_kernels.analysis.workload import Case, declares_calls, every_case, parse_workload
from tpu_kernels.hub import find_loaded

INDEX = Path(__file__).parents[1] / "registry" / "index.json"
MODELS = ("qwen3-30b-a3b", "gemma-4-26b-a4b", "gpt-oss-20b", "mixtral-8x7b")
PHASES = (
    "decode:8",
    "decode:64",
    "decode:512",
    "prefill:8192",
    "train:2048",
    "decode:64:ep8",
    "decode:64:tp8",
)
WORKLOADS = tuple(f"{model}:{phase}" for model in MODELS for phase in PHASES)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One compile of the matrix: a kernel's op in a case, for a generation."""

    kernel: str
    case: Case
    generation: str

    @property
    def row(self) -> str:
        return f"{self.kernel} {self.case.op} {self.case.name}"


def shipped_kernels() -> list[str]:
    """The repositories in the registry."""
    return sorted(json.loads(INDEX.read_text())["kernels"])


def _load(name: str) -> ModuleType:
    return get_kernel(name, version=max(map(int, json.loads(INDEX.read_text())["kernels"][name])))


def has_cases(name: str) -> bool:
    """Whether a kernel says what a model's layer consists of: `calls(workload)` in its cases.py."""
    return declares_calls(_load(name))


def cells(kernels: Iterable[str], workloads: Sequence[str]) -> list[Cell]:
    """What is to be compiled of these kernels: all ops that have calls in the workloads."""
    found = []
    for name in kernels:
        kernel = _load(name)
        for generation in _claimed(kernel):
            for workload in map(parse_workload, workloads):
                cases = every_case(kernel, workload, tpu=generation)
                found += [Cell(name.partition("/")[2], case, generation) for case in cases]
    return found


def _claimed(kernel: ModuleType) -> Sequence[str]:
    loaded = find_loaded(kernel)
    assert loaded is not None
    assert loaded.metadata.tpu is not None
    return loaded.metadata.tpu.generations


def compile_cells(chosen: Sequence[Cell], **options: Any) -> list[tuple[Cell, CompileReport]]:
    """Compiles them; `options` are those of `compile_many`."""
    reports = compile_many([cell.case.job for cell in chosen], **options)
    return list(zip(chosen, reports, strict=True))


def table(results: Sequence[tuple[Cell, CompileReport]]) -> Table:
    """A row a case, a column a generation: VMEM, or why it does not compile."""
    generations = list(dict.fromkeys(cell.generation for cell, _ in results))
    grid = Table(title="compiled, not run: VMEM")
    grid.add_column("kernel, op, case, part")
    for generation in generations:
        grid.add_column(generation, justify="right")
    rows: dict[str, dict[str, str]] = {}
    for cell, report in results:
        text = format_bytes(report.vmem_bytes) if report.failure is None else f"no ({report.failure.stage})"
        rows.setdefault(cell.row, {})[cell.generation] = text
    for name, row in rows.items():
        grid.add_row(name, *(row.get(generation, "") for generation in generations))
    return grid


def main(
    kernel: Annotated[list[str] | None, typer.Option(help="A kernel; all that ship unless given.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="A case; those of four models unless given.")] = None,
) -> None:
    """Compile the matrix; exit status 1 if anything of it does not compile."""
    kernels = kernel or shipped_kernels()
    chosen = cells(kernels, case or WORKLOADS)
    console = Console(width=None if Console().is_terminal else 160, emoji=False)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("compiling", total=len(chosen))
        results = compile_cells(chosen, on_report=lambda report: progress.advance(bar))
    console.print(table(results))
    for name in kernels:
        if not has_cases(name):
            console.print(f"NOT RUN: {name} has no calls(workload) in its cases.py")
    failed = [(cell, report.failure) for cell, report in results if report.failure is not None]
    for cell, failure in failed:
        console.print(f"{cell.row} for {cell.generation}: {failure.summary}", markup=False, soft_wrap=True)
    console.print(f"{len(results) - len(failed)} of {len(results)} compile")
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
