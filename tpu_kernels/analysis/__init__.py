"""Answers about TPUs without a TPU.

`compile` runs the real TPU compiler on a function and reports what it says::

    report = analysis.compile(fn, *args, tpu="v6e")
    print(report)

Importing this package loads neither jax nor torch.
"""

from __future__ import annotations

from .compiler import Job, compile, compile_many
from .failure import Allocation, Failure
from .hlo import Kernel, XlaOp
from .report import CompileReport, Memory

__all__ = [
    "Allocation",
    "CompileReport",
    "Failure",
    "Job",
    "Kernel",
    "Memory",
    "XlaOp",
    "compile",
    "compile_many",
]
