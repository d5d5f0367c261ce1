"""`python -m tpu_kernels.emulation script.py ...`: runs a program as python does, on an emulated TPU."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from ..errors import EmulationError
from . import install


def main() -> None:
    """Installs the emulated TPU, then runs the script or module that the command line names.

    Example:
        python -m tpu_kernels.emulation generate.py --tokens 32
        python -m tpu_kernels.emulation -m pytest tests
    """
    parser = argparse.ArgumentParser(
        prog="tpu-kernels emulate",
        usage="%(prog)s [-m] program ...",
        description="Run a Python program on an emulated TPU.",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="the program is a module's name")
    parser.add_argument("program", help="a script, or a module after -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own arguments")
    options = parser.parse_args()
    script = Path(options.program)
    if not options.is_module and not script.exists():
        parser.error(f"there is no file {script}")
    try:
        install()
    except EmulationError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")

    sys.argv = [options.program, *options.arguments]
    if options.is_module:
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    else:
        if not sys.flags.safe_path:
            # A script finds its neighbours; so far this is the current folder, as for every `python -m`.
            sys.path[0] = str(script.resolve().parent)
        runpy.run_path(options.program, run_name="__main__")


if __name__ == "__main__":
    main()
