"""`tpu-kernels golden`: a kernel's examples and their results in float64, for devices to be tried on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import authoring


def golden(
    source: Annotated[Path, typer.Argument(help="The folder of a kernel's source.")] = Path(),
) -> None:
    """Make a kernel's golden vectors, from its examples and its reference in float64.

    Example: tpu-kernels golden kernels_src/ragged-dot

    They are built into the kernel, and `tpu-kernels selftest` runs them on a user's device.
    """
    path = authoring.write_golden(source)
    typer.echo(f"{path}: {path.stat().st_size} bytes")
