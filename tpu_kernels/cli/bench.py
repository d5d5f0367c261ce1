"""``tpu-kernels bench``: measure."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..bench.comparison import compare
from ..bench.decode import run
from ..bench.html import page
from ..bench.output import check_writable, write_result
from ..bench.plot import check_available, draw
from ..bench.presets import PRESETS
from ..bench.ranks import is_first
from ..bench.report import render
from ..bench.results import DecodeConfig, DecodeResult, DeviceChoice, DtypeChoice
from ..errors import BenchmarkError
from .output import split, whole_numbers

app = typer.Typer(help="Measure models and kernels.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Measure models and kernels."""


@app.command()
def decode(
    model: Annotated[
        str, typer.Option(help=f"A Hub id, a folder, or preset:NAME with NAME of {', '.join(PRESETS)}.")
    ],
    experts: Annotated[
        str,
        typer.Option(
            help="Arms, comma-separated: experts implementations, 'stock' being the model as it loads, each run by "
            "transformers' loop or, with '+loop' after it, by tpu_kernels.generate."
        ),
    ] = "tpu_fused_experts+loop,tpu_fused_experts,stock",
    batch: Annotated[str, typer.Option(help="Batch sizes in sequences, comma-separated.")] = "1,8,64",
    prompt_file: Annotated[
        Path | None, typer.Option(help="UTF-8 text to cut prompts from; a built-in text unless given.")
    ] = None,
    prompt_length: Annotated[int, typer.Option(help="Tokens in each prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(help="Decode steps to time.")] = 64,
    repeats: Annotated[int, typer.Option(help="Timed runs, after one that compiles.")] = 3,
    device: Annotated[
        str, typer.Option(help="auto, tpu, emulated or cpu. Only tpu gives speeds of a TPU.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32 or bfloat16.")] = "auto",
    parallel: Annotated[
        str, typer.Option(help="ep8, tp8: a plan over ranks, under tpu-kernels run; tp1: one process.")
    ] = "tp1",
    json: Annotated[
        Path | None, typer.Option(help="Write everything, raw samples included, to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw throughput over batch size to this PNG file.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with all of it to this file.")] = None,
) -> None:
    """Decode throughput of a model: experts implementations side by side, at several batch sizes."""
    for path in filter(None, (json, plot, html)):
        check_writable(path)
    if plot is not None or html is not None:
        check_available()
    config = DecodeConfig(
        model=model,
        experts=tuple(split(experts)),
        batches=whole_numbers("batch", batch),
        prompt_length=prompt_length,
        new_tokens=new_tokens,
        repeats=repeats,
        prompt_file=prompt_file,
        # `run` refuses, by name, a choice that is not one.
        device=cast(DeviceChoice, device),
        dtype=cast(DtypeChoice, dtype),
        parallel=parallel,
    )
    with _progress(config) as observe:
        result = run(config, observe)
    if not is_first():
        return
    _print(render(result))
    if json is not None:
        write_result(json, result.to_json().encode())
    if plot is not None:
        write_result(plot, draw(result))
    if html is not None:
        write_result(html, page(result).encode())


@app.command(name="compare")
def compare_(
    before: Annotated[Path, typer.Argument(help="What bench decode --json wrote.")],
    after: Annotated[Path, typer.Argument(help="And wrote later.")],
) -> None:
    """Two results of `bench decode` beside each other."""
    _print(compare(_read(before), _read(after)))


def _read(path: Path) -> DecodeResult:
    try:
        return DecodeResult.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchmarkError(f"cannot read {path}: {error.strerror}") from error


def _print(table: Group) -> None:
    # Off a terminal rich assumes 80 columns, and a table in a log file would be folded for nothing.
    Console(width=None if sys.stdout.isatty() else 150).print(table)


@contextlib.contextmanager
def _progress(config: DecodeConfig) -> Iterator[Callable[[str], None]]:
    """A bar over the runs of the model, on a terminal only, from the first one on: loading has its own."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not (console.is_terminal and is_first()),
    )
    task = bar.add_task("", total=config.phases)
    announced = 0

    def observe(phase: str) -> None:
        nonlocal announced
        if announced == 0:
            bar.start()
        bar.update(task, description=phase, completed=announced)
        announced += 1

    try:
        yield observe
    finally:
        bar.stop()
