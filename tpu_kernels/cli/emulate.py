"""`tpu-kernels emulate`: runs a program on an emulated TPU."""

from __future__ import annotations

import os
import sys

import typer

# Everything from the program's name on is the program's, even what looks like an option of this command.
CONTEXT_SETTINGS = {
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
}


def emulate(ctx: typer.Context) -> None:
    """Run a Python script (or `-m module`) with its arguments on an emulated TPU.

    Example: tpu-kernels emulate generate.py --tokens 32
    """
    # A fresh interpreter has not imported torch, and the program's traceback and exit code are its own.
    os.execv(sys.executable, [sys.executable, "-m", "tpu_kernels.emulation", *ctx.args])
