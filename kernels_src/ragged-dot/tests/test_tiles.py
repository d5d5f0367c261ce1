"""Configs: those that there are for a shape, and those of other shapes that may serve it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_dot.forward_tiles import Product
from ragged_dot.quantised import exponents_of
from ragged_dot.tiles import CHIPS, vmem_budget
from ragged_dot.weight_tiles import WeightProduct

GENERATIONS = st.sampled_from(sorted(CHIPS))
ROWS = st.integers(1, 1 << 17)
AXES = st.integers(1, 90).map(lambda units: 64 * units)


@st.composite
def groups(draw):
    here = draw(st.integers(1, 256))
    return here, here * draw(st.sampled_from([1, 8]))


FORWARD = st.builds(
    lambda m, k, n, groups, transposed, wide, dtype: Product(
        m, k, n, *groups, dtype, dtype, transposed, wide
    ),
    ROWS,
    AXES,
    AXES,
    groups(),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.sampled_from(["bfloat16", "float32"]),
)
INT8 = st.builds(
    lambda product: dataclasses.replace(product, dtype="bfloat16", weights="int8", scales=1), FORWARD
)
MXFP4 = st.builds(
    lambda product, units: dataclasses.replace(
        product, k=128 * units, transposed=False, weights="int32", scales=exponents_of(128 * units)
    ),
    INT8,
    st.integers(1, 45),
)
WEIGHTS = st.builds(lambda m, k, n, groups: WeightProduct(m, k, n, *groups), ROWS, AXES, AXES, groups())


@settings(max_examples=40)
@given(st.one_of(FORWARD, WEIGHTS, INT8, MXFP4), GENERATIONS)
def test_all_candidates_fit_their_own_shape(problem, tpu):
    candidates = problem.candidates(tpu)
    assert len(set(candidates)) == len(candidates)
    if len(candidates) > 1:  # else it may be the smallest of those that do not fit
        assert all(problem.fitting(dataclasses.asdict(config), tpu) == config for config in candidates)


@settings(max_examples=60)
@given(FORWARD, FORWARD, GENERATIONS, st.data())
def test_a_config_of_another_shape_serves_only_where_the_kernel_can(one, other, tpu, data):
    config = other.fitting(dataclasses.asdict(data.draw(st.sampled_from(one.candidates(tpu)))), tpu)
    if config is None:
        return
    tile = 8 if other.dtype == "float32" else 16
    share = other.n // config.shares
    pieces = -(-share // config.columns) * (other.k // config.depth)
    assert config.shares == 1 or other.n % (config.shares * 128) == 0
    assert config.rows % tile == 0
    assert other.k % config.depth == 0
    assert config.columns == share or (config.columns % 128 == 0 and (other.transposed or share % 128 == 0))
    step = 128 if other.transposed else tile
    assert config.depth == other.k or config.depth % step == 0
    assert config.slots >= (pieces if config.by_group else 2), (
        "else the ring never holds what a group waits for"
    )
    assert config.resident == (config.buffers == 1)
    assert other.vmem_bytes(config, CHIPS[tpu]) <= config.vmem_bytes == vmem_budget(tpu)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 24},
        {"rows": True},
        {"columns": 200},
        {"depth": 96},
        {"slots": 1},
        {"slots": 1 << 20},
        {"buffers": 0},
        {"by_group": 1},
        {"more": 1},
    ],
)
def test_what_is_no_config_for_a_shape_is_none(change):
    product = Product(4096, 2048, 1536, 128, 128)
    good = dataclasses.asdict(product.candidates("v6e")[0])
    assert product.fitting(good, "v6e") is not None
    assert product.fitting({**good, **change}, "v6e") is None


def test_rows_of_other_chips_do_not_count():
    """Expert parallelism: all rows come, but those of the weights that are here are an eighth."""
    [all_here, some_here] = (Product(8192, 2048, 1536, 16, sizes).candidates("v6e")[0] for sizes in (16, 128))
    assert some_here.rows < all_here.rows
