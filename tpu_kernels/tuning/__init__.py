"""Searching for the fastest config of a kernel, without a TPU or on one.

A kernel chooses configs through its copy of `tpu_kernels.ops.tables`. The search follows its own words::

    subject    the kernel, and a copy of it that other processes load
    problems   the calls of models' layers are traced -> [Task]: problems that configs were chosen for
    search     the likeliest candidates of each, in processes side by side -> [Tuned]
      trial    one candidate in one process: simulated, or measured on a TPU
    table      the best ones, in JSON, where the kernel looks them up
"""

from __future__ import annotations

from .problems import Task, find_tasks
from .search import Trial, Tuned, tune
from .subject import Subject, built_source, loaded_kernel
from .table import write_table

__all__ = [
    "Subject",
    "Task",
    "Trial",
    "Tuned",
    "built_source",
    "find_tasks",
    "loaded_kernel",
    "tune",
    "write_table",
]
