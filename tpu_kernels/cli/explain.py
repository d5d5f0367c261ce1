"""`tpu-kernels explain`: which build of a kernel would be loaded here, and why, or why none."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..hub.reference import Reference
from ..hub.resolve import resolve
from .output import AsJson, Project, SourceName, Trusted, parse_references, sources_of


def explain(
    name: Annotated[str, typer.Argument(help="The kernel: org/name, or org/name@N for one version.")],
    version: Annotated[int | None, typer.Option(help="The version; else the newest.")] = None,
    revision: Annotated[
        str | None, typer.Option(help="A branch, tag or commit instead of a version.")
    ] = None,
    source: SourceName = None,
    project: Project = None,
    trust: Trusted = None,
    as_json: AsJson = False,
) -> None:
    """Say which build of a kernel would be loaded and why.

    Example: tpu-kernels explain tpu-kernels/ragged-dot

    The exit status is 0 if there is one, 1 if there is none.
    """
    [reference] = parse_references([name], version)
    if revision is not None:
        reference = Reference(reference.repo_id, reference.version, revision)
    explanation = resolve(reference, sources_of(source, trust, project))
    typer.echo(json.dumps(explanation.as_dict(), indent=2) if as_json else str(explanation))
    raise typer.Exit(0 if explanation.build is not None else 1)
