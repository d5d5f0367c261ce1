"""Measuring, as far as that goes without a TPU: the arithmetic, and that nothing else is taken for one."""

from __future__ import annotations

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_kernels.analysis import Job
from tpu_kernels.errors import TuningError
from tpu_kernels.tuning.measure import measure, seconds_of_call


@given(st.floats(1e-6, 1.0), st.floats(0.0, 0.1))
def test_what_is_fixed_is_no_part_of_a_call(call: float, fixed: float) -> None:
    assert seconds_of_call(lambda calls: fixed + calls * call) == pytest.approx(call, rel=1e-6)


def test_only_a_tpu_is_measured_on() -> None:
    shape = jax.ShapeDtypeStruct((8, 128), "float32")
    with pytest.raises(TuningError, match=r"times on v6e can only be measured on one, and JAX has cpu here"):
        measure(Job(lambda x: x, (shape,), "v6e"))
