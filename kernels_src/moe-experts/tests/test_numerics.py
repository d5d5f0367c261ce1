"""The layer's numbers, interpreted, against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts_oracle import TOLERANCE, f64, layer, relative_l2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_experts import functions, reference
from moe_experts.cases import GPT_OSS
from moe_experts.config import DENSE_TOKENS, MOST_TOKENS, choose
from moe_experts.shapes import Config

settings.register_profile("kernels", deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("kernels")

interpreted = functools.partial(functions.fused_experts, interpret=True)
VMEM = 1 << 26

FORMS = {
    "silu": {},
    "gelu": {"activation": "gelu"},
    "gelu-tanh": {"activation": "gelu_tanh", "transposed": True},
    "relu": {"activation": "relu", "biased": True},
    "no-gate": {"activation": "relu2", "gated": False},
    "no-gate-biased": {"activation": "relu2", "gated": False, "biased": True, "transposed": True},
    "gpt-oss": {**GPT_OSS, "biased": True},
    "gpt-oss-not-transposed": {**GPT_OSS, "transposed": False, "biased": True},
    "clamped": {"limit": 0.5},
    "int8": {"quantised": "int8"},
    "int8-gpt-oss": {**GPT_OSS, "biased": True, "quantised": "int8"},
    "shared": {"shared": 96},  # as large as the others, or not
    "shared-transposed": {"shared": 64, "transposed": True},
    "shared-biased": {"shared": 64, **GPT_OSS, "biased": True},
    "shared-int8": {"shared": 64, "quantised": "int8"},
    "mxfp4": {"quantised": "mxfp4", "transposed": True},
    "mxfp4-gpt-oss": {**GPT_OSS, "biased": True, "quantised": "mxfp4"},
}


@st.composite
def routings(draw, tokens, choices, experts):
    """Ids [T, k]: of all experts, of one, of few and none here, repeated ones within a token, sentinels."""
    kind = draw(st.sampled_from(["all", "one", "few", "elsewhere", "repeated"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    if kind == "one":
        return np.full((tokens, choices), rng.integers(experts))
    if kind == "elsewhere":
        return np.full((tokens, choices), draw(st.sampled_from([experts, experts + 7, -1])))
    if kind == "repeated":
        return np.repeat(rng.integers(0, experts, (tokens, 1)), choices, axis=1)
    among = experts if kind == "all" else 6 * experts
    return np.stack([rng.permutation(max(among, choices))[:choices] for _ in range(tokens)])


@settings(max_examples=30)
@given(data=st.data())
def test_layer_agrees_with_float64(data):
    form = data.draw(st.sampled_from(list(FORMS)))
    tokens = data.draw(st.sampled_from([1, 3, 8, 16, 33]))
    choices, experts = data.draw(st.sampled_from([(1, 3), (2, 8), (4, 11)]))
    # (A block of MXFP4 is 32 numbers.)
    odd = (160, 224) if FORMS[form].get("quantised") == "mxfp4" else (36, 100)
    hidden, intermediate = data.draw(st.sampled_from([(64, 64), (128, 96), odd]))
    dtype, routing = data.draw(
        st.sampled_from([("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
    )
    index = data.draw(routings(tokens, choices, experts))
    made = layer(
        index,
        experts=experts,
        hidden=hidden,
        intermediate=intermediate,
        dtype=dtype,
        routing=routing,
        seed=data.draw(st.integers(0, 2**16)),
        **FORMS[form],
    )
    expected = made.expected()
    for function in (interpreted, reference.fused_experts):
        out = function(*made.operands, **made.form)
        assert out.dtype == dtype
        assert relative_l2(out, expected) <= TOLERANCE[dtype]


PIECES = {
    "whole": Config(768, 640, 1, 1, 0, VMEM),
    "ring": Config(256, 256, 2, 1, 0, VMEM),
    "two-experts-ahead": Config(384, 128, 4, 10, 0, VMEM),
    "odd-ring": Config(256, 128, 5, 3, 0, VMEM),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("config", PIECES.values(), ids=PIECES)
def test_pieces_and_slots_do_not_change_the_result(config, transposed):
    index = np.random.default_rng(0).integers(0, 7, (9, 3))  # experts 5 and 6 are another rank's
    made = layer(
        index, experts=5, hidden=640, intermediate=384, biased=True, transposed=transposed, limit=2.0
    )
    out = interpreted(*made.operands, config=config, **made.form)
    assert relative_l2(out, made.expected()) <= 1e-5


@pytest.mark.parametrize("form", ["silu", "gelu-tanh", "gpt-oss", "no-gate", "int8"])
@pytest.mark.parametrize(("tokens", "among"), [(1, 4), (130, 4), (300, 16), (256, 1)])
def test_gathered_tokens(form, tokens, among):
    """Experts with no, few, a tile's and several tiles' tokens."""
    rng = np.random.default_rng(tokens)
    index = np.stack([rng.permutation(max(among, 2))[:2] for _ in range(tokens)])
    index = np.zeros_like(index) if among == 1 else index
    made = layer(index, experts=4, hidden=128, intermediate=96, dtype="bfloat16", **FORMS[form])
    columns = made.operands[3].shape[2 if made.form.get("transposed") else 1]
    out = interpreted(*made.operands, config=Config(columns, 128, 1, 1, 32, VMEM), **made.form)
    assert relative_l2(out, made.expected()) <= 1e-2


@pytest.mark.parametrize("rows", [0, 48], ids=["dense", "gathered"])
@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_not_finite_stays_in_its_token(rows, transposed):
    """Tokens with NaN and inf, one that overflows on the way, and one that no expert here gets."""
    rng = np.random.default_rng(0)
    index = rng.integers(0, 4, (140, 2))
    index[9] = 99
    made = layer(
        index,
        experts=4,
        hidden=128,
        intermediate=128,
        dtype="bfloat16",
        activation="relu",
        transposed=transposed,
    )
    states, *others = made.operands
    states = states.at[5, 3].set(jnp.nan).at[7, 0].set(jnp.inf).at[9, 1].set(jnp.nan).at[11].mul(1e38)
    out = f64(interpreted(states, *others, config=Config(256, 128, 1, 1, rows, VMEM), **made.form))
    bad = [5, 7, 11]
    assert not np.isfinite(out[bad]).all(axis=1).any()
    assert not out[9].any()
    others_fine = np.delete(np.arange(140), bad)
    assert relative_l2(out[others_fine], made.expected()[others_fine]) <= 1e-2


def test_numbers_of_tokens_around_what_they_are_rounded_to():
    rng = np.random.default_rng(0)
    made = layer(rng.integers(0, 5, (40, 2)), experts=4, hidden=64, intermediate=64)
    states, index, weights, *others = made.operands
    expected = made.expected()
    for tokens in (1, 2, 4, 5, 7, 9, 15, 16, 17, 31, 33, 40):
        out = interpreted(states[:tokens], index[:tokens], weights[:tokens], *others)
        assert relative_l2(out, expected[:tokens]) <= 1e-5, tokens


def test_nothing_to_do_gives_zeros():
    made = layer(np.zeros((0, 2), int), experts=2, hidden=64, intermediate=64)
    assert interpreted(*made.operands).shape == (0, 64)


@pytest.mark.parametrize("form", [form for form in FORMS if not FORMS[form].get("quantised")])
def test_gradient_and_many_tokens_agree_with_the_reference(form):
    """Both are those of the grouped matmuls."""
    rng = np.random.default_rng(1)
    index = rng.integers(-1, 6, (9, 3))  # -1 and 5 are no experts here
    made = layer(index, experts=5, hidden=64, intermediate=64, **FORMS[form])
    shared, form = "shared" in FORMS[form], made.form
    states, index, *floats = made.operands
    grad = jnp.asarray(rng.standard_normal(states.shape), jnp.float32)

    def results(function):
        def run(states, *floats):
            return function(states, index, *floats, **form)

        out, pullback = jax.vjp(run, states, *floats)
        return [out, *jax.tree.leaves(pullback(grad))]

    for actual, expected in zip(results(interpreted), results(reference.fused_experts), strict=True):
        assert np.isfinite(expected).all()
        assert relative_l2(actual, f64(expected)) <= 1e-5
    of_tokens = (0, len(floats) - 1) if shared else (0,)
    floats = [each.repeat(130, 0) if place in of_tokens else each for place, each in enumerate(floats)]
    many = (states.repeat(130, 0), index.repeat(130, 0), *floats)
    assert relative_l2(interpreted(*many, **form), f64(reference.fused_experts(*many, **form))) <= 1e-5


def test_gradient_with_int8_weights():
    rng = np.random.default_rng(0)
    made = layer(rng.integers(0, 5, (9, 3)), experts=5, hidden=64, intermediate=64, quantised="int8")
    states, index, routing, into, back, _, _, *scales = made.operands
    grad = jnp.asarray(rng.standard_normal(states.shape), jnp.float32)

    def results(function):
        def run(states, routing, *scales):
            return function(states, index, routing, into, back, None, None, *scales)

        out, pullback = jax.vjp(run, states, routing, *scales)
        return [out, *jax.tree.leaves(pullback(grad))]

    for actual, expected in zip(results(interpreted), results(reference.fused_experts), strict=True):
        assert relative_l2(actual, f64(expected)) <= 1e-5


def test_many_tokens_with_mxfp4_weights():
    """More than one call takes: the grouped matmuls read them as they are."""
    index = np.random.default_rng(0).integers(0, 4, (1100, 2))
    made = layer(index, experts=3, hidden=64, intermediate=64, quantised="mxfp4", transposed=True)
    assert relative_l2(interpreted(*made.operands, **made.form), made.expected()) <= 1e-5


def shape(tokens, dtype=jnp.bfloat16, hidden=2048, intermediate=768):
    return functions.Shape(
        tokens,
        8,
        16,
        hidden,
        intermediate,
        2 * intermediate,
        dtype,
        dtype,
        jnp.float32,
        False,
        True,
        False,
        False,
    )


@pytest.mark.parametrize("tpu", ["v5e", "v5p", "v6e", "tpu7x"])
def test_regime_follows_the_tokens(tpu):
    assert choose(shape(1), tpu).rows == 0
    assert choose(shape(DENSE_TOKENS[tpu]), tpu).rows == 0
    assert choose(shape(DENSE_TOKENS[tpu] + 1), tpu).rows in (32, 64)
    assert choose(shape(DENSE_TOKENS[tpu] + 1, jnp.float32), tpu) is None
    assert choose(shape(MOST_TOKENS[tpu] + 1), tpu) is None


def test_pieces_shrink_until_they_fit():
    """An expert of 352 MB goes through 128 MiB of vector memory; a token of 10**6 features does not."""
    config = choose(shape(8, hidden=4096, intermediate=14336), "v6e")
    assert config.gate_up_slots * config.gate_up_piece < 2 * 14336
    assert choose(shape(256, hidden=2**20), "v6e") is None
