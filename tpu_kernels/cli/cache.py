"""`tpu-kernels cache`: what is kept on this machine, and deleting what is old."""

from __future__ import annotations

import re
import shutil
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ..analysis import cache as outcomes
from ..analysis.sizes import format_bytes
from ..hub.bucket import builds_folder
from ..hub.manage.inventory import CachedItem, cached_items, hub_cache_folder
from ..hub.manage.prune import prune as prune_items
from .output import AsJson, make_table, print_json, show

app = typer.Typer(help="See and prune what is kept on this machine.", no_args_is_help=True)

_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@app.callback()
def _group() -> None:
    """See and prune what is kept on this machine.

    Example: tpu-kernels cache prune --older-than 30d --dry-run
    """


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the kernels that are kept, with what interrupted downloads left.

    Example: tpu-kernels cache list
    """
    items = cached_items()
    if as_json:
        print_json(items=items)
        return
    show(_table(items) if items else "nothing is cached")


@app.command()
def size(as_json: AsJson = False) -> None:
    """Say how large each cache is.

    Example: tpu-kernels cache size
    """
    items = _items()
    folders: dict[str, Path] = {"hub": hub_cache_folder(), "builds": builds_folder()}
    folders.update((kind, outcomes.cache_folder(kind)) for kind in outcomes.KINDS)
    sizes = {name: sum(item.size for item in items if item.cache == name) for name in folders}
    if as_json:
        caches = [{"cache": name, "path": path, "size": sizes[name]} for name, path in folders.items()]
        print_json(caches=caches, size=sum(sizes.values()))
        return
    table = make_table(
        None, "cache", "size", "free on its disk", "folder", right=("size", "free on its disk")
    )
    for name, path in folders.items():
        table.add_row(name, format_bytes(sizes[name]), format_bytes(_free(path)), str(path))
    show(table)


@app.command()
def prune(
    older_than: Annotated[
        str | None, typer.Option(help="Delete what was not used for this long: 12h, 30d, 8w.")
    ] = None,
    keep_latest: Annotated[
        int | None, typer.Option(min=0, help="Spare this many of the newest versions of each kernel.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete what is old.

    Example: tpu-kernels cache prune --older-than 30d --keep-latest 2

    With both options, what both of them allow. What a running process has loaded stays. Exit status 1 if
    something could not be deleted.
    """
    if older_than is None and keep_latest is None:
        raise typer.BadParameter("say what to delete: --older-than 30d, --keep-latest 2, or both")
    report = prune_items(
        _items(),
        older_than=None if older_than is None else _age(older_than),
        keep_latest=keep_latest,
        dry_run=dry_run,
    )
    if as_json:
        print_json(dry_run=dry_run, **vars(report))
    else:
        # Outcomes are many, and nobody knows one by its name.
        if named := [item for item in report.removed if item.cache not in outcomes.KINDS]:
            show(_table(named))
        outcomes_removed = len(report.removed) - len(named)
        freed = format_bytes(sum(item.size for item in report.removed))
        verb = "would be deleted" if dry_run else "deleted"
        show(
            f"{verb}: {len(named)} kernels, {outcomes_removed} outcomes of compiles and simulations; {freed}"
        )
        for item in report.in_use:
            show(f"in use by a process, kept: {_name(item)}")
        for item in report.failed:
            typer.echo(f"could not be deleted: {item.path}", err=True)
    raise typer.Exit(1 if report.failed else 0)


def _items() -> list[CachedItem]:
    """Everything that is kept: kernels, and what the compiler and the simulator said."""
    analysed = [
        CachedItem(kind, None, None, path.stem, path, path.stat().st_size, path.stat().st_mtime)
        for kind, path in outcomes.kept()
    ]
    return cached_items() + analysed


def _age(text: str) -> timedelta:
    match = re.fullmatch(r"(\d{1,5})([mhdw])", text.strip())
    if match is None:
        raise typer.BadParameter(f"--older-than {text!r} is no age; give one like 12h, 30d or 8w")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def _table(items: list[CachedItem]) -> Table:
    table = make_table(None, "cache", "kernel", "version", "revision", "size", "last used", right=("size",))
    for item in items:
        used = datetime.fromtimestamp(item.last_used).strftime("%Y-%m-%d %H:%M")
        version = "" if item.version is None else str(item.version)
        name = "interrupted download" if item.leftover else item.kernel or ""
        table.add_row(item.cache, name, version, item.revision[:12], format_bytes(item.size), used)
    return table


def _name(item: CachedItem) -> str:
    version = "" if item.version is None else f" v{item.version}"
    return f"{item.kernel or item.cache}{version} ({item.revision[:12]})"


def _free(path: Path) -> int:
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    return shutil.disk_usage(existing).free
