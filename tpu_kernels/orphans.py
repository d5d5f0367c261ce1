"""No work goes on for a process that is gone."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int) -> None:
    """Makes the kernel end this process when `parent` ends, however that ends; elsewhere than on Linux a no-op.

    Args:
        parent: The process id of this process's parent, as the parent knows it: it may be gone by now.

    Example:
        >>> die_with(int(sys.argv[1]))  # doctest: +SKIP
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which this one worked for, is gone")
