"""Kernels and cases as the command line names them; shared by `compile` and `simulate`."""

from __future__ import annotations

from types import ModuleType
from typing import Annotated

import typer

from .. import get_kernel
from ..analysis.workload import Case, find_cases

PUBLISHER = "tpu-kernels"

KernelArgument = Annotated[
    str, typer.Argument(help=f"The kernel's repository, org/name; without org, one of {PUBLISHER}.")
]
CASE_HELP = (
    "A layer of a model, <model>:<phase>:<tokens> as in qwen3-30b-a3b:decode:64, with :tp8 or :ep8 behind it for "
    "one of 8 chips; phases are decode, prefill and train; or a case that the kernel itself names. May be repeated."
)


def repository(name: str) -> str:
    """The repository that `name` is short for."""
    return name if "/" in name else f"{PUBLISHER}/{name}"


def load_kernel(name: str, version: int | None) -> ModuleType:
    """The kernel; its newest version unless one is given."""
    return get_kernel(repository(name), version=version)


def load_cases(
    kernel: str, version: int | None, names: list[str], targets: list[str], op: str | None
) -> list[Case]:
    """The calls of the kernel's op in all cases, for all targets."""
    module = load_kernel(kernel, version)
    return [
        case for name in names for target in targets for case in find_cases(module, name, tpu=target, op=op)
    ]
