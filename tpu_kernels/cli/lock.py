"""`tpu-kernels lock`: pin the kernels of a project to builds, by commit and by content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..hub.configuration import configured_sources
from ..hub.layout import LOCK_FILE
from ..hub.lock import read_former_lock, read_lock, write_lock
from ..hub.lock_source import LockSource
from ..hub.locking import lock_kernels, read_requirements
from ..hub.sources import LocalSource
from ..hub.trust import Trust


def lock(
    project: Annotated[Path, typer.Argument(help="The project: the folder of its pyproject.toml.")] = Path(),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 if the lock does not fit.")
    ] = False,
    upgrade: Annotated[
        bool, typer.Option("--upgrade", "-U", help="Take the newest builds of the same versions.")
    ] = False,
    upgrade_kernel: Annotated[
        list[str] | None,
        typer.Option("--upgrade-kernel", "-P", help="Take the newest build of this kernel; may be repeated."),
    ] = None,
    trust: Annotated[
        list[str] | None, typer.Option(help="An organisation or org/name to trust; may be repeated.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what is locked, or what is wrong, as JSON.")
    ] = False,
) -> None:
    """Lock the kernels that tool.kernels.dependencies in pyproject.toml lists.

    Example: tpu-kernels lock
    """
    requirements = read_requirements(project)
    path = project / LOCK_FILE
    if check:
        problems = read_lock(path).problems(requirements)
        typer.echo(json.dumps(problems, indent=2) if as_json else "\n".join(problems) or f"{path} fits")
        raise typer.Exit(1 if problems else 0)
    sources = [
        source
        for source in configured_sources(None, Trust.of(trust or False))
        if not isinstance(source, LocalSource | LockSource)
    ]
    former = None if upgrade else read_former_lock(path)
    kernels = lock_kernels(requirements, sources, former, upgrade=upgrade_kernel or ())
    write_lock(path, kernels)
    if as_json:
        typer.echo(
            json.dumps([kernel.model_dump(by_alias=True, mode="json") for kernel in kernels], indent=2)
        )
        return
    for kernel in kernels:
        typer.echo(f"{kernel.reference}: {kernel.commit or 'from a registry'}, {', '.join(kernel.builds)}")
    typer.echo(f"{len(kernels)} locked in {path}")
