"""The ``tpu-kernels`` command. Each command is a thin module here; torch is imported when one runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from .. import __version__
from ..errors import TpuKernelsError
from ..log import get_logger
from . import bench, cache
from .build import build
from .check import check
from .compile import compile
from .dashboard import dashboard
from .doctor import doctor
from .download import download
from .emulate import CONTEXT_SETTINGS as EMULATE_SETTINGS
from .emulate import emulate
from .explain import explain
from .golden import golden
from .info import info
from .init import init
from .list import list_
from .lock import lock
from .mirror import mirror
from .project import project
from .publish import publish
from .run import CONTEXT_SETTINGS as RUN_SETTINGS
from .run import run
from .selftest import selftest
from .simulate import simulate
from .tune import tune
from .verify import verify
from .versions import versions
from .warm import warm
from .yank import yank

app = typer.Typer(
    name="tpu-kernels",
    help="The kernel hub for Google TPUs in PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",  # joins the lines of a paragraph
    pretty_exceptions_enable=False,
)
# In the order of the help.
_PANELS: dict[str, dict[str, Callable[..., None]]] = {
    "Start here": {"doctor": doctor},
    "Find kernels": {"list": list_, "info": info, "versions": versions, "explain": explain},
    "Get and keep kernels": {
        "download": download,
        "verify": verify,
        "selftest": selftest,
        "lock": lock,
        "mirror": mirror,
    },
    "Plan and run models": {"project": project, "warm": warm},
    "Make and publish kernels": {
        "init": init,
        "check": check,
        "golden": golden,
        "build": build,
        "publish": publish,
        "yank": yank,
    },
    "Measure kernels": {"compile": compile, "simulate": simulate, "tune": tune, "dashboard": dashboard},
}
for panel, commands in _PANELS.items():
    for name, command in commands.items():
        app.command(name, rich_help_panel=panel)(command)
app.add_typer(cache.app, name="cache", rich_help_panel="Get and keep kernels")
app.command("run", context_settings=RUN_SETTINGS, rich_help_panel="Plan and run models")(run)
app.command("emulate", context_settings=EMULATE_SETTINGS, rich_help_panel="Measure kernels")(emulate)
app.add_typer(bench.app, name="bench", rich_help_panel="Measure kernels")


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
