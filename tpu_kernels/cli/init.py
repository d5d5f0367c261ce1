"""`tpu-kernels init`: a new kernel from a template."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import authoring


def init(
    name: Annotated[str, typer.Argument(help="The kernel's name, or organisation/name.")],
    template: Annotated[
        str, typer.Option(help="What to start from: attention, elementwise, experts, layer or matmul.")
    ] = "elementwise",
    out: Annotated[
        Path | None, typer.Option(help="The folder to write; one of the kernel's name here unless given.")
    ] = None,
) -> None:
    """Start a kernel: a complete small one, which passes its check as it is.

    Example: tpu-kernels init acme/fast-norm --template layer
    """
    folder = authoring.init(name, template, out)
    typer.echo(f"{folder}: {authoring.templates()[template]}")
    typer.echo(f"next: edit torch-ext/, then: tpu-kernels check {folder} --quick")
