"""How far results may be off."""

from __future__ import annotations

import numpy as np
import pytest

from tpu_kernels.authoring.comparison import compare


@pytest.mark.parametrize(
    ("size", "off", "right"),
    [
        (1000, 0.009, True),
        (1000, 0.012, False),
        (3, 0.012, True),  # errors of so few do not average out
        (3, 0.03, False),
        (1, 0.05, False),
    ],
)
def test_many_results_may_be_off_by_less_than_few(size: int, off: float, right: bool) -> None:
    wanted = np.full(size, 2.0)
    difference = compare([wanted * (1 + off)], [wanted], 0.01)
    assert difference.error == pytest.approx(off)
    assert bool(difference.wrong) is not right


def test_one_wrong_element_among_many_is_found() -> None:
    wanted = np.ones(100_000)
    found = wanted.copy()
    found[12_345] = 1.3
    assert "worst at [12345]: 1.3, expected 1; 1 of 100000" in compare([found], [wanted], 0.01).wrong
