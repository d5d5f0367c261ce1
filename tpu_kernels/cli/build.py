"""`tpu-kernels build`: from a kernel's source to the artifact of the Hub, or to the shipped registry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import authoring


def build(
    source: Annotated[
        Path, typer.Argument(help="A kernel's source; with --registry, the folder of all kernel sources.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Write the kernel repository here; a former build is replaced.")
    ] = None,
    registry: Annotated[
        Path | None, typer.Option(help="Build every kernel in SOURCE into this registry.")
    ] = None,
) -> None:
    """Build a kernel.

    Example: tpu-kernels build kernels_src/ragged-dot --out dist/ragged-dot
    """
    if out is not None and registry is None:
        kernels, target = [authoring.build(source, out)], out
    elif registry is not None and out is None:
        kernels, target = authoring.build_registry(source, registry), registry
    else:
        raise typer.BadParameter("give one of --out and --registry")
    for kernel in kernels:
        typer.echo(f"{kernel.repo_id} v{kernel.metadata.version}: {kernel.metadata.id} in {target}")
