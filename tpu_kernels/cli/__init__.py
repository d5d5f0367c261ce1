"""The ``tpu-kernels`` command. Each command is a thin module here; torch is imported when one runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .. import __version__
from ..errors import TpuKernelsError
from ..log import get_logger
from . import bench, cache
from .build import build
from .compile import compile
from .doctor import doctor
from .download import download
from .emulate import CONTEXT_SETTINGS as EMULATE_SETTINGS
from .emulate import emulate
from .explain import explain
from .info import info
from .list import list_
from .lock import lock
from .mirror import mirror
from .simulate import simulate
from .tune import tune
from .verify import verify
from .versions import versions

app = typer.Typer(
    name="tpu-kernels",
    help="The kernel hub for Google TPUs in PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# In the order of the help: the first minute; find kernels, get them, look after them; make them.
app.command()(doctor)
app.command("list")(list_)
app.command()(info)
app.command()(versions)
app.command()(explain)
app.command()(download)
app.command()(verify)
app.command()(lock)
app.command()(mirror)
app.add_typer(cache.app, name="cache")
app.command()(build)
app.command()(compile)
app.command()(simulate)
app.command()(tune)
app.command(context_settings=EMULATE_SETTINGS)(emulate)
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tpu-kernels {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """The kernel hub for Google TPUs in PyTorch."""


def main() -> None:
    """Runs the command line; this package's errors become one line and exit status 2."""
    try:
        app()
    except TpuKernelsError as error:
        get_logger().debug("where it was raised:", exc_info=error)
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
