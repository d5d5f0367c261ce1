"""`tpu-kernels list`: the kernels that can be had without asking the Hub."""

from __future__ import annotations

import typer

from ..hub.manage.catalogue import list_kernels
from .output import AsJson, Project, SourceName, make_table, print_json, show, sources_of


def list_(source: SourceName = None, project: Project = None, as_json: AsJson = False) -> None:
    """List kernels.

    Example: tpu-kernels list --source registry

    Those of every source that can be listed: overrides, registries, buckets, and of the Hub what is cached
    here. Exit status 1 if a source could not be asked.
    """
    kernels, failures = list_kernels(sources_of(source, None, project))
    if as_json:
        print_json(kernels=kernels, failures=failures)
    else:
        table = make_table(None, "kernel", "versions", "source", "")
        for kernel in kernels:
            versions = ", ".join(map(str, kernel.versions)) or "any"
            note = f"another name for {kernel.alias_of}" if kernel.alias_of else ""
            table.add_row(kernel.kernel, versions, kernel.source, note)
        show(table if kernels else "no kernels")
        for failure in failures:
            typer.echo(f"{failure.source}: {failure.error}", err=True)
    raise typer.Exit(1 if failures else 0)
