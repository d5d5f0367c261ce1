"""`tpu-kernels verify`: digests computed again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..hub.configuration import configured_sources
from ..hub.manage.check import check_folder, check_kernels
from ..hub.reference import Reference
from ..hub.trust import Trust
from .output import AsJson, make_table, print_json, show


def verify(
    what: Annotated[
        str | None,
        typer.Argument(
            help="A kernel (org/name) or the folder of one, or of a registry; else all kernels here."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the files of kernels on this machine.

    Example: tpu-kernels verify tpu-kernels/ragged-dot

    Computes every digest again, of what is cached, shipped or in a folder (./org/name). Nothing is fetched or
    run. Exit status 1 if a file is not the one that was promised.
    """
    # org/name is a kernel, unless there is a folder of that very name.
    if what is not None and (what.startswith((".", "/", "~")) or Path(what).is_dir()):
        checked = check_folder(Path(what).expanduser())
    else:
        repo_id = None if what is None else Reference(what).repo_id
        checked = check_kernels(repo_id, configured_sources(None, Trust()))
    if as_json:
        print_json(builds=checked)
    else:
        table = make_table(None, "kernel", "version", "where", "files")
        for build in checked:
            state = f"{len(build.violations)} wrong" if build.violations else "right"
            table.add_row(build.kernel, str(build.version or ""), build.place, state)
        show(table if checked else "no kernels on this machine")
        for build in checked:
            for violation in build.violations:
                typer.echo(f"{build.path}{os.sep}: {violation}", err=True)
    raise typer.Exit(1 if any(build.violations for build in checked) else 0)
