"""Answers about TPUs without a TPU.

`compile` runs the real TPU compiler on a function and reports what it says::

    report = analysis.compile(fn, *args, tpu="v6e")
    print(report)

`simulate` executes the scalar side of the compiled kernels and tells how long they take::

    profile = analysis.simulate(fn, *args, tpu="v6e", data={"group_sizes": sizes})
    print(profile)

Importing this package loads neither jax nor torch nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .compiler import Job, compile, compile_many
from .failure import Allocation, Failure
from .hlo import Kernel, XlaOp
from .report import CompileReport, Memory

if TYPE_CHECKING:
    from .simulator import Profile, simulate, simulate_many

__all__ = [
    "Allocation",
    "CompileReport",
    "Failure",
    "Job",
    "Kernel",
    "Memory",
    "Profile",
    "XlaOp",
    "compile",
    "compile_many",
    "simulate",
    "simulate_many",
]


def __getattr__(name: str) -> Any:
    if name in ("Profile", "simulate", "simulate_many"):
        from . import simulator

        return getattr(simulator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
