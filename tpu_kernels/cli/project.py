"""`tpu-kernels project`: a model's decode step on a TPU slice, from its config alone."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..errors import ProjectionError
from .output import AsJson, print_json, show


def project(
    model: Annotated[str, typer.Argument(help="A Hub id, a folder with a config.json, or such a file.")],
    tpu: Annotated[str, typer.Option(help="A slice, such as v6e-8.")] = "v6e-8",
    parallel: Annotated[
        str,
        typer.Option(
            help="ep8: experts over 8 chips, the rest whole on each; tp8: every matrix over 8; tp4ep2; tp1: one chip."
        ),
    ] = "ep8",
    batch: Annotated[str, typer.Option(help="Batch sizes in sequences, comma-separated.")] = "1,8,64",
    context: Annotated[int, typer.Option(help="Keys in each sequence's cache.")] = 1024,
    experts: Annotated[
        str,
        typer.Option(
            help="Experts implementations, comma-separated; 'published' is kernels-community/ragged-dot-tpu's way."
        ),
    ] = "batched_mm,grouped_mm,published,tpu_fused_experts",
    attention: Annotated[
        str | None,
        typer.Option(
            help="Attention implementations, comma-separated: eager, sdpa, tpu_attention. Unless given, tpu_attention "
            "with experts of this library and sdpa with others."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that each compile may take.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Project a model's decode step on a TPU slice: time, memory, where it goes, what to fix. Runs no TPU.

    Example: tpu-kernels project Qwen/Qwen3-30B-A3B --tpu v6e-8 --parallel ep8 --batch 1,64
    """
    from ..projection import project as run
    from ..projection.report import render

    batches = tuple(_whole_number(item) for item in _split(batch))
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading the config", total=None)
        projection = run(
            model,
            tpu=tpu,
            parallel=parallel,
            batches=batches,
            context=context,
            experts=_split(experts),
            attention=_split(attention) if attention else None,
            timeout=timeout,
            observe=lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
        )
    if as_json:
        print_json(**projection.model_dump(mode="json"))
    else:
        show(*render(projection))
    if not any(row.fits and not row.not_projected for row in projection.rows):
        sys.exit(1)


def _split(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ProjectionError(f"batch {text!r} is no whole number; give such as 1,8,64") from None
