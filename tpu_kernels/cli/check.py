"""`tpu-kernels check`: everything that can be known of a kernel without a TPU, in one report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import authoring
from .output import AsJson, print_json, progress


def check(
    source: Annotated[Path, typer.Argument(help="The folder of a kernel's source.")] = Path(),
    quick: Annotated[
        bool, typer.Option(help="A part only: some examples, one generation, no simulation, no emulated TPU.")
    ] = False,
    only: Annotated[list[str] | None, typer.Option(help="Make only this check; may be repeated.")] = None,
    junit: Annotated[
        Path | None, typer.Option(help="Also write the report to this file, as JUnit XML.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a kernel's source; exit status 1 if a check fails.

    Example: tpu-kernels check kernels_src/ragged-dot --quick

    Metadata, lint, numerics and gradients against the reference, memory, the real TPU compiler for each claimed
    generation, simulated speed, torch on the CPU and on an emulated TPU, stock kernels. What cannot be checked here is
    said to be not run.
    """
    checks = len(only or ()) or len(authoring.CHECKS)
    with progress("checking", checks) as begin:
        report = authoring.check(
            source, quick=quick, only=only or (), on_outcome=lambda outcome: begin(f"after {outcome.check}")
        )
    if junit is not None:
        junit.write_bytes(report.to_junit())
    if as_json:
        print_json(kernel=report.kernel, ok=report.ok, checks=report.outcomes)
    else:
        typer.echo(str(report))
    raise typer.Exit(0 if report.ok else 1)
