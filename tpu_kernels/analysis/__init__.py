"""Answers about TPUs without a TPU.

`compile` runs the real TPU compiler on a function and reports what it says::

    report = analysis.compile(fn, *args, tpu="v6e")
    print(report)

`simulate` executes the scalar side of the compiled kernels and tells how long they take::

    profile = analysis.simulate(fn, *args, tpu="v6e", data={"group_sizes": sizes})
    print(profile)

Importing this package loads neither jax nor torch.
"""

from __future__ import annotations

from .compiler import Job, compile, compile_many
from .failure import Allocation, Failure
from .hlo import Kernel, XlaOp
from .report import CompileReport, Memory
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
