"""One candidate in a process of its own: the other side of `search`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import hub
from ..analysis import CompileReport, simulate_many
from ..errors import TpuKernelsError
from ..orphans import die_with
from .problems import Task


def load(path: str, parent: int) -> None:
    """Loads the kernel, so that its problems and configs can be read here, in a process of `parent`."""
    die_with(parent)
    hub.get_local_kernel(path)


@dataclass(frozen=True)
class Failed:
    """Why a candidate has no time.

    Attributes:
        reason: For people.
        lasting: It would fail again: a compiler that crashed or took too long may not.
    """

    reason: str
    lasting: bool = True


def simulated(task: Task, config: Any, timeout: float) -> float | Failed:
    """How long the problem takes with a config, in ms."""
    job, reports = task.job(config), list[CompileReport]()
    try:
        [profile] = simulate_many([job], workers=1, timeout=timeout, on_report=reports.append)
    except TpuKernelsError as error:
        failure = reports[0].failure if reports else None
        return Failed(str(error), failure is None or failure.stage not in ("crash", "timeout"))
    return profile.time_ms


def measured(task: Task, config: Any, timeout: float) -> float | Failed:
    """The same on the TPU of this machine; `timeout` takes no effect."""
    from .measure import measure

    try:
        return measure(task.job(config))
    except TpuKernelsError:
        raise
    except Exception as error:  # noqa: BLE001  whatever a candidate fails with is the answer
        return Failed(f"{type(error).__name__}: {error}", lasting=False)
