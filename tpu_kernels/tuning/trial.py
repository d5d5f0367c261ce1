"""One candidate in a process of its own: the other side of `search`."""

from __future__ import annotations

from typing import Any

from .. import analysis, hub
from ..errors import TpuKernelsError
from .problems import Task


def load(path: str) -> None:
    """Loads the kernel, so that its problems and configs can be read here."""
    hub.get_local_kernel(path)


def simulated(task: Task, config: Any, timeout: float) -> float | str:
    """How long the problem takes with a config, in ms; or why it cannot be told."""
    job = task.job(config)
    try:
        profile = analysis.simulate(job.fn, *job.args, tpu=job.tpu, data=job.data, timeout=timeout)
    except TpuKernelsError as error:
        return f"{type(error).__name__}: {error}"
    return profile.time_ms


def measured(task: Task, config: Any, timeout: float) -> float | str:
    """The same on the TPU of this machine; `timeout` takes no effect."""
    from .measure import measure

    try:
        return measure(task.job(config))
    except TpuKernelsError:
        raise
    except Exception as error:  # noqa: BLE001  whatever a candidate fails with is the answer
        return f"{type(error).__name__}: {error}"
