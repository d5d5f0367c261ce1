"""`tpu-kernels explain`: which build of a kernel would be loaded here, and why, or why none."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .. import hub


def explain(
    name: Annotated[str, typer.Argument(help="The kernel's repository, org/name.")],
    version: Annotated[int | None, typer.Option(help="The version; else the newest.")] = None,
    revision: Annotated[
        str | None, typer.Option(help="A branch, tag or commit instead of a version.")
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="Look only here: local, registry, hub, or a registry's folder or URL.")
    ] = None,
    trust: Annotated[
        list[str] | None, typer.Option(help="An organisation or org/name to trust; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the explanation as JSON.")] = False,
) -> None:
    """Say which build of a kernel would be loaded and why: tpu-kernels explain tpu-kernels/ragged-dot

    The exit status is 0 if there is one, 1 if there is none.
    """
    explanation = hub.explain(
        name, version=version, revision=revision, source=source, trust_remote_code=trust or False
    )
    typer.echo(json.dumps(explanation.as_dict(), indent=2) if as_json else str(explanation))
    raise typer.Exit(0 if explanation.build is not None else 1)
