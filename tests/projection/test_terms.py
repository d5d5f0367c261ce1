from hypothesis import given
from hypothesis import strategies as st

from tpu_kernels.projection.records import Collective
from tpu_kernels.projection.terms import collective_bounds


@given(
    st.sampled_from(["all-reduce", "all-gather"]),
    st.integers(2, 64),
    st.integers(1, 8192),
    st.integers(1, 256),
    st.sampled_from(["v5e", "v5p", "v6e", "tpu7x"]),
)
def test_more_to_exchange_takes_longer(kind, chips, width, batch, generation):
    def bounds(**changes):
        values = {"kind": kind, "module": "mlp", "chips": chips, "width": width} | changes
        return collective_bounds(Collective(**values), batch, generation)

    some, more_columns, more_chips = bounds(), bounds(width=2 * width), bounds(chips=2 * chips)
    assert 0 < some.low <= some.high
    for more in (more_columns, more_chips):
        assert some.low <= more.low
        assert some.high <= more.high
