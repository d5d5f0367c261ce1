"""`tpu-kernels versions`: the versions of a kernel, source by source."""

from __future__ import annotations

from typing import Annotated

import typer

from ..hub.manage.catalogue import list_versions
from .output import AsJson, Project, SourceName, Trusted, make_table, print_json, show, sources_of


def versions(
    name: Annotated[str, typer.Argument(help="The kernel's repository, org/name.")],
    source: SourceName = None,
    project: Project = None,
    trust: Trusted = None,
    as_json: AsJson = False,
) -> None:
    """List the versions of a kernel.

    Example: tpu-kernels versions tpu-kernels/ragged-dot

    Marks the one that get_kernel would load where none is asked for. Exit status 1 if there is none.
    """
    found, failures = list_versions(name, sources_of(source, trust, project))
    if as_json:
        print_json(kernel=name, versions=found, failures=failures)
    else:
        if found:
            table = make_table(name, "version", "source", "commit", "", right=("version",))
            for item in found:
                version = "any" if item.version is None else str(item.version)
                table.add_row(version, item.source, (item.commit or "")[:12], "loads" if item.taken else "")
            show(table)
        for failure in failures:
            typer.echo(f"{failure.source}: {failure.error}", err=True)
        if not found and not failures:
            typer.echo(
                f"no source has {name}; tpu-kernels explain {name} says where it was looked for", err=True
            )
    raise typer.Exit(0 if found else 1)
