"""How far results are from what they should be, and how far they may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Relative L2 error that a dtype's results may have. Of single elements ten times as much is allowed, in relation to
# their own size and the usual one: that finds a row, or an element, that is wrong among many.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
_ELEMENTS = 10.0
# Errors of fewer elements than these do not average out.
_MANY = 16


@dataclass(frozen=True)
class Difference:
    """Results beside what they should be.

    Attributes:
        error: Relative L2 error, of all elements.
        tolerance: What it may be.
        wrong: What is not as it should be; empty where all is.
    """

    error: float
    tolerance: float
    wrong: str = ""


def tolerance_of(dtype: str) -> float:
    """The relative L2 error that results may have; none for integers."""
    return TOLERANCE.get(dtype, 0.0)


def compare(actual: Sequence[Any], expected: Sequence[Any], tolerance: float) -> Difference:
    """Compares arrays, as float64 in numpy, and names the worst element where they differ too much."""
    import numpy as np

    if len(actual) != len(expected):
        return Difference(float("inf"), tolerance, f"{len(actual)} results, expected {len(expected)}")
    worst = 0.0
    for place, (found, wanted) in enumerate(zip(actual, expected, strict=True)):
        which = f"result {place} " if len(actual) > 1 else ""
        if found.shape != wanted.shape:
            wrong = f"{which}has shape {found.shape}, expected {wanted.shape}"
            return Difference(float("inf"), tolerance, wrong)
        if not wanted.size:
            continue
        with np.errstate(invalid="ignore", over="ignore"):
            same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
            apart = np.where(same, 0.0, np.abs(found - wanted))
            apart = np.where(np.isfinite(apart), apart, np.inf)
            finite = np.where(np.isfinite(wanted), wanted, 0.0)
            norm = float(np.linalg.norm(finite))
            usual = norm / wanted.size**0.5
            error = float(np.linalg.norm(apart)) / norm if norm else float(apart.max())
            ratio = apart / np.maximum(np.abs(finite) + usual, np.finfo(np.float32).tiny)
        worst = max(worst, error)
        allowed = tolerance * max(1.0, _MANY / wanted.size) ** 0.5
        if error > allowed or float(ratio.max()) > _ELEMENTS * tolerance:
            at = tuple(map(int, np.unravel_index(int(ratio.argmax()), ratio.shape)))
            wrong = (
                f"{which}has a relative error of {error:.2g}, allowed {allowed:.3g}; worst at {list(at)}: "
                f"{found[at]:.6g}, expected {wanted[at]:.6g}; {np.count_nonzero(ratio > _ELEMENTS * tolerance)} of "
                f"{ratio.size} elements are off"
            )
            return Difference(error, tolerance, wrong)
    return Difference(worst, tolerance)
