"""Errors of ops.

This folder travels inside built kernels, where `tpu_kernels` may not be installed. Where it is loaded, the
errors join its family; else they are plain `ValueError`s and `RuntimeError`s.
"""

from __future__ import annotations

import sys

_hub = sys.modules.get("tpu_kernels.errors")
_family: tuple[type[Exception], ...] = (_hub.TpuKernelsError,) if _hub else ()


class InputError(*_family, ValueError):  # type: ignore[misc]
    """An op was given tensors or values it cannot take: shapes, dtypes, devices, group sizes."""


class LoweringError(*_family, RuntimeError):  # type: ignore[misc]
    """A kernel's JAX function could not be made into a program for the device."""
