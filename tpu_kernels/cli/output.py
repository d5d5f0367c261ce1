"""What commands share: options, tables, JSON, progress."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..errors import BenchmarkError, TpuKernelsError
from ..hub.configuration import configured_sources, lock_file, project_lock
from ..hub.reference import Reference
from ..hub.sources import Source
from ..hub.trust import Trust

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Trusted = Annotated[
    list[str] | None,
    typer.Option("--trust", help="An organisation or org/name to trust; may be repeated."),
]
SourceName = Annotated[
    str | None,
    typer.Option("--source", help="Look only here: local, registry, hub, or a registry's folder or URL."),
]

Project = Annotated[
    Path | None,
    typer.Option("--project", help="Answer as for a program of the project in this folder: by its lock."),
]


def sources_of(
    source: str | None, trust: Sequence[str] | None = None, project: Path | None = None
) -> tuple[Source, ...]:
    """The sources that a command asks, by its options; a lock that lies here and is not asked is mentioned."""
    sources = configured_sources(source, Trust.of(trust or False), project=project)
    if source is None and project is None and lock_file() is None and (lock := project_lock(Path())):
        typer.echo(f"note: {lock} is not looked at; --project . does", err=True)
    return sources


def split(items: str) -> list[str]:
    """The items of a comma-separated list.

    Example:
        >>> split("1, 8,")
        ['1', '8']
    """
    return [stripped for item in items.split(",") if (stripped := item.strip())]


def whole_numbers(name: str, items: str) -> tuple[int, ...]:
    """The numbers of a comma-separated list, called `name` where one is none.

    Example:
        >>> whole_numbers("batch", "1,8")
        (1, 8)
    """
    try:
        return tuple(map(int, split(items)))
    except ValueError as error:
        item = str(error).partition(": ")[2]
        raise BenchmarkError(f"{name} {item} is not a whole number; give numbers, as in 1,8,64") from error


def print_json(**data: Any) -> None:
    """Prints `data` as one JSON object."""
    typer.echo(json.dumps(to_data(data), indent=2))


def to_data(value: Any) -> Any:
    """`value` as what JSON holds, with keys in kebab case: records become objects, errors kind and message.

    Example:
        >>> from tpu_kernels.hub.reference import Reference
        >>> to_data({"reference": Reference("a/b", 1)})
        {'reference': {'repo-id': 'a/b', 'version': 1, 'revision': None}}
    """
    if isinstance(value, TpuKernelsError):
        return {"kind": type(value).__name__, "message": str(value)}
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key).replace("_", "-"): to_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_data(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def parse_references(names: Sequence[str], version: int | None) -> list[Reference]:
    """The kernels that a command names; `version` is for those that name none."""
    references = [Reference.parse(name) for name in names]
    return [r if r.pinned or version is None else Reference(r.repo_id, version) for r in references]


def make_table(title: str | None, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table; `right` are the columns of numbers."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def show(*renderables: Any) -> None:
    """Prints tables and texts."""
    # Off a terminal rich assumes 80 columns, and what goes to a log file would be folded for nothing.
    console = Console(width=None if sys.stdout.isatty() else 140, emoji=False)
    for renderable in renderables:
        console.print(renderable, markup=False, highlight=False, soft_wrap=not isinstance(renderable, Table))


@contextlib.contextmanager
def progress(description: str, total: int | None) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal's stderr; it is given the name of each thing before that is done."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        disable_progress_bars,
        enable_progress_bars,
    )

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with contextlib.ExitStack() as stack:
        # Its own bars, one a file, would write over this one.
        disable_progress_bars()
        stack.callback(enable_progress_bars)
        bar = stack.enter_context(
            Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        )
        task = bar.add_task(description, total=total)
        done = 0

        def begin(name: str) -> None:
            nonlocal done
            bar.update(task, description=f"{description} {name}", completed=done)
            done += 1

        yield begin
