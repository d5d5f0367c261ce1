"""The kernels' numbers, interpreted, against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from ragged_dot import functions, reference
from ragged_dot.forward_tiles import Product

settings.register_profile("kernels", deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("kernels")

interpreted = functools.partial(functions.ragged_dot, interpret=True)
DTYPES = ["float32", "bfloat16"]


@st.composite
def products(draw):
    """A grouped product: sizes with empty groups, straddling groups, rows past the groups, offsets."""
    # Few lengths and axes: each combination is a compilation, while the sizes themselves are data.
    count, groups = draw(st.sampled_from([(1, 1), (5, 5), (5, 2)]))
    size = st.one_of(st.just(0), st.integers(0, 40))
    sizes = draw(st.lists(size, min_size=count, max_size=count))
    k, n = draw(st.sampled_from([(64, 128), (192, 320), (36, 100), (1, 64)]))
    return {
        "m": draw(st.sampled_from([m for m in (8, 33, 96, 160, 220) if m >= sum(sizes)])),
        "k": k,
        "n": n,
        "sizes": sizes,
        "groups": groups,
        "offset": draw(st.integers(0, count - groups)),
        "transpose_rhs": draw(st.booleans()),
        "dtype": draw(st.sampled_from(DTYPES)),
        "seed": draw(st.integers(0, 2**16)),
    }


def operands(p):
    rng = np.random.default_rng(p["seed"])
    shape = (p["groups"], p["n"], p["k"]) if p["transpose_rhs"] else (p["groups"], p["k"], p["n"])
    lhs, rhs, grad = (rng.standard_normal(s) for s in ((p["m"], p["k"]), shape, (p["m"], p["n"])))
    arrays = [jnp.asarray(a, p["dtype"]) for a in (lhs, rhs, grad)]
    return *arrays, jnp.asarray(p["sizes"], jnp.int32), jnp.asarray([p["offset"]], jnp.int32)


@pytest.mark.parametrize("function", [interpreted, reference.ragged_dot], ids=["kernel", "reference"])
@settings(max_examples=10)
@given(p=products())
def test_product_and_gradients_agree_with_float64(function, p):
    lhs, rhs, grad, sizes, offset = operands(p)

    def product(lhs, rhs):
        return function(lhs, rhs, sizes, offset, transpose_rhs=p["transpose_rhs"])

    out, pullback = jax.vjp(product, lhs, rhs)
    d_lhs, d_rhs = pullback(grad)

    where = {"offset": p["offset"], "transpose_rhs": p["transpose_rhs"]}
    tolerance = oracle.TOLERANCE[p["dtype"]]
    assert oracle.relative_l2(out, oracle.ragged_dot(lhs, rhs, p["sizes"], **where)) <= tolerance
    expected_lhs, expected_rhs = oracle.gradients(lhs, rhs, grad, p["sizes"], **where)
    assert oracle.relative_l2(d_lhs, expected_lhs) <= tolerance
    assert oracle.relative_l2(d_rhs, expected_rhs) <= tolerance
    assert out.dtype == lhs.dtype
    assert d_rhs.dtype == rhs.dtype


def test_every_number_of_rows():
    """M around every multiple of a row tile, and of a chunk: no row count falls between two."""
    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.standard_normal((300, 64)), jnp.float32)
    rhs = jnp.asarray(rng.standard_normal((3, 64, 64)), jnp.float32)
    edges = (16, 32, 64, 128, 256)
    for m in [*range(10), *(edge + d for edge in edges for d in (-1, 0, 1)), 300]:
        sizes = [m // 3, 0, m - m // 3 - m // 10]
        out = interpreted(lhs[:m], rhs, jnp.asarray(sizes))
        assert oracle.relative_l2(out, oracle.ragged_dot(lhs[:m], rhs, sizes)) <= 1e-5, m


@settings(max_examples=8)
@given(
    activation=st.sampled_from([None, "silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped"]),
    gating=st.sampled_from([None, "concatenated", "interleaved"]),
    bias=st.booleans(),
    transpose_rhs=st.booleans(),
    columns=st.sampled_from([64, 256]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_epilogues_and_their_gradients_agree_with_the_reference(
    activation, gating, bias, transpose_rhs, columns, dtype, seed
):
    """Bias, activation and gate in the kernel; 64 columns are too few for some layouts, and are done apart."""
    assume((gating is None) == (activation is None) or activation not in (None, "swiglu_clamped"))
    assume(not (gating is None and activation == "swiglu_clamped"))
    rng = np.random.default_rng(seed)
    sizes, m, k = [7, 0, 21], 40, 128
    n = columns * (2 if gating else 1)
    lhs, rhs, added, grad = (
        jnp.asarray(rng.standard_normal(shape) / 4, dtype)
        for shape in ((m, k), (3, n, k) if transpose_rhs else (3, k, n), (3, n), (m, columns))
    )
    static = {"transpose_rhs": transpose_rhs, "activation": activation, "gating": gating}
    static |= {"alpha": 1.7, "limit": 0.5} if activation == "swiglu_clamped" else {}

    def results(function):
        def run(lhs, rhs, added):
            return function(lhs, rhs, jnp.asarray(sizes), None, added if bias else None, **static)

        out, pullback = jax.vjp(run, lhs, rhs, added)
        return out, *pullback(grad)

    for actual, expected in zip(results(interpreted), results(reference.ragged_dot), strict=True):
        assert np.isfinite(np.asarray(expected, np.float32)).all()
        assert actual.dtype == expected.dtype
        assert oracle.relative_l2(actual, oracle.f64(expected)) <= 2 * oracle.TOLERANCE[dtype]


@pytest.mark.parametrize("function", [interpreted, reference.ragged_dot], ids=["kernel", "reference"])
def test_what_no_group_uses_cannot_reach_a_result(function):
    """NaN in rows past the groups, in their gradients and in the weights of groups without rows."""
    rng = np.random.default_rng(1)
    sizes, m = [5, 0, 9], 32
    lhs = rng.standard_normal((m, 64))
    rhs = rng.standard_normal((3, 64, 64))
    grad = rng.standard_normal((m, 64))
    lhs[14:], grad[14:], rhs[1] = np.nan, np.inf, np.nan
    lhs, rhs, grad = (jnp.asarray(a, jnp.float32) for a in (lhs, rhs, grad))

    out, pullback = jax.vjp(lambda lhs, rhs: function(lhs, rhs, jnp.asarray(sizes)), lhs, rhs)
    d_lhs, d_rhs = pullback(grad)

    for result in (out, d_lhs, d_rhs):
        assert np.isfinite(result).all()
    assert not out[14:].any()
    assert not d_lhs[14:].any()
    assert not d_rhs[1].any()


@pytest.mark.parametrize(("sizes", "effective"), [([-3, 8, 0], [0, 8, 0]), ([10, 30, 7], [10, 22, 0])])
def test_wrong_group_sizes_stay_within_the_arrays(sizes, effective):
    """On a TPU nobody looks at the values: a negative size counts as 0, and rows past M are cut off."""
    rng = np.random.default_rng(2)
    lhs = jnp.asarray(rng.standard_normal((32, 64)), jnp.float32)
    rhs = jnp.asarray(rng.standard_normal((3, 64, 64)), jnp.float32)
    for function in (interpreted, reference.ragged_dot):
        out = function(lhs, rhs, jnp.asarray(sizes))
        assert oracle.relative_l2(out, oracle.ragged_dot(lhs, rhs, effective)) <= 1e-5


@pytest.mark.parametrize("tpu", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
@pytest.mark.parametrize("m", [8, 512, 8192, 524288])
def test_few_rows_stay_in_vector_memory_and_weights_are_read_once(m, tpu):
    """What the config must get right: a group's weights are its traffic, whatever the number of rows."""
    config = Product(m, 2048, 1536, 128, 128).candidates(tpu)[0]
    assert config.resident or m > 512
    assert config.by_group or config.rows >= m // 128 or tpu == "v4"


def test_result_dtype_is_free_of_the_operands():
    lhs = jnp.ones((8, 64), jnp.bfloat16) / 3
    rhs = jnp.ones((1, 64, 64), jnp.bfloat16) / 7
    out = interpreted(lhs, rhs, jnp.asarray([8]), preferred_element_type=jnp.float32)
    assert out.dtype == jnp.float32
    assert oracle.relative_l2(out, oracle.ragged_dot(lhs, rhs, [8])) <= 1e-6


@settings(max_examples=8)
@given(
    tokens=st.sampled_from([0, 1, 9]),
    choices=st.sampled_from([1, 4]),
    transposed=st.booleans(),
    activation=st.sampled_from(["silu", "gelu", "gelu_tanh", "relu"]),
    seed=st.integers(0, 2**16),
)
def test_experts_and_their_gradients_agree_with_the_reference(tokens, choices, transposed, activation, seed):
    """The sorted form against the one that goes expert by expert; sentinels and poisoned weights included."""
    rng = np.random.default_rng(seed)
    count, hidden, inner = 5, 64, 64
    index = jnp.asarray(rng.integers(0, count + 1, (tokens, choices)))  # `count` is a sentinel
    unused = [e for e in range(count) if not (index == e).any()]

    def weight(*shape):
        values = rng.standard_normal((count, *(reversed(shape) if transposed else shape))) / 8
        values[unused] = np.nan
        return jnp.asarray(values, jnp.float32)

    arguments = (
        jnp.asarray(rng.standard_normal((tokens, hidden)), jnp.float32),
        jnp.asarray(rng.random((tokens, choices)), jnp.float32),
        weight(2 * inner, hidden),
        weight(hidden, inner),
    )
    grad = jnp.asarray(rng.standard_normal((tokens, hidden)), jnp.float32)

    def results(function, **static):
        def run(states, weights, gate_up, down):
            return function(
                states, index, weights, gate_up, down, activation=activation, transposed=transposed, **static
            )

        out, pullback = jax.vjp(run, *arguments)
        return out, *pullback(grad)

    for actual, expected in zip(
        results(functions.experts, interpret=True), results(reference.experts), strict=True
    ):
        assert np.isfinite(expected).all()
        assert oracle.relative_l2(actual, oracle.f64(expected)) <= 1e-5
