"""What commands share: options, tables, JSON, progress."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Trusted = Annotated[
    list[str] | None,
    typer.Option("--trust", help="An organisation or org/name to trust; may be repeated."),
]
SourceName = Annotated[
    str | None,
    typer.Option("--source", help="Look only here: local, registry, hub, or a registry's folder or URL."),
]


def print_json(data: Any) -> None:
    """Prints `data` as JSON."""
    typer.echo(json.dumps(data, indent=2))


def make_table(title: str | None, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table; `right` are the columns of numbers."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def show(*renderables: Any) -> None:
    """Prints tables and texts."""
    # Off a terminal rich assumes 80 columns, and what goes to a log file would be folded for nothing.
    console = Console(width=None if sys.stdout.isatty() else 140)
    for renderable in renderables:
        if isinstance(renderable, str):
            console.print(renderable, markup=False, highlight=False, soft_wrap=True)
        else:
            console.print(renderable)


@contextlib.contextmanager
def progress(description: str, total: int | None) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal's stderr; it is given the name of each thing before that is done."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=total)
        done = 0

        def begin(name: str) -> None:
            nonlocal done
            bar.update(task, description=f"{description} {name}", completed=done)
            done += 1

        yield begin
