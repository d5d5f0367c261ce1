import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_kernels.errors import ProjectionError
from tpu_kernels.projection.plan import ParallelPlan, parse_plan


@given(st.builds(ParallelPlan, st.integers(1, 64), st.integers(1, 64)))
def test_a_plan_is_read_as_it_is_written(plan):
    assert parse_plan(str(plan)) == plan


@pytest.mark.parametrize("name", ["", "8", "ep", "ep0", "dp8", "ep2tp4", "tp4 ep2"])
def test_what_is_no_plan_is_refused(name):
    with pytest.raises(ProjectionError, match="is no parallel plan; give one such as tp1, ep8"):
        parse_plan(name)
