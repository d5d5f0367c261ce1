"""`tpu-kernels selftest`: a kernel's golden vectors on the device that is here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import get_kernel, get_local_kernel
from ..authoring.golden import Vector, run_golden
from ..device import current
from ..doctor.selftests import remember
from .cases import repository
from .output import AsJson, SourceName, Trusted, make_table, print_json, show


def selftest(
    kernel: Annotated[str, typer.Argument(help="A kernel, org/name, or the folder of a build.")],
    version: Annotated[int | None, typer.Option(help="Its version; the newest unless given.")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="A device of torch; the TPU unless given, or where there is none the CPU."),
    ] = None,
    source: SourceName = None,
    trust: Trusted = None,
    as_json: AsJson = False,
) -> None:
    """Run a kernel's golden vectors on the device here; exit status 1 if a result is wrong.

    Example: tpu-kernels selftest tpu-kernels/ragged-dot

    For a new machine, or after an upgrade of torch_tpu or libtpu, of which `doctor` reminds. (`verify` is about files:
    it runs nothing.)
    """
    local = kernel.startswith((".", "/", "~")) or Path(kernel).is_dir()
    if local:
        module = get_local_kernel(Path(kernel).expanduser())
    else:
        module = get_kernel(
            repository(kernel), version=version, source=source, trust_remote_code=trust or False
        )
    here = current()
    vectors = list(run_golden(module, device or ("cpu" if here.kind == "cpu" else "tpu")))
    passed = all(vector.passed for vector in vectors)
    if passed and not local:
        remember(repository(kernel))
    if as_json:
        print_json(kernel=module.__name__, device=device or here.describe(), passed=passed, vectors=vectors)
    else:
        table = make_table(f"on {device or here.describe()}", "example", "result", "error", "allowed")
        for vector in vectors:
            table.add_row(vector.name, *_cells(vector))
        show(table)
        for vector in vectors:
            if not vector.passed:
                typer.echo(f"{vector.name}: {_wrong(vector)}", err=True)
    raise typer.Exit(0 if passed else 1)


def _cells(vector: Vector) -> tuple[str, str, str]:
    difference = vector.difference
    figures = (f"{difference.error:.2g}", f"{difference.tolerance:g}") if difference else ("", "")
    return ("pass" if vector.passed else "FAIL", *figures)


def _wrong(vector: Vector) -> str:
    return vector.failure or (vector.difference.wrong if vector.difference else "")
