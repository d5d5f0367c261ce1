"""The op's numbers, interpreted, against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import functions, reference
from attention.cases import CASES
from attention.decode_config import VMEM_BYTES, choose, vmem_bytes
from attention.shapes import Config, Shape
from attention_oracle import TOLERANCE, f64, keys_seen, relative_l2, step
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

settings.register_profile("kernels", deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("kernels")

interpreted = functools.partial(functions.decode_attention, interpret=True)
VMEM = 1 << 26


@st.composite
def steps(draw):
    """Lengths from nothing to everything, padding on the left, windows, and every feature of the op."""
    batch, new = draw(st.sampled_from([1, 3])), draw(st.sampled_from([1, 2, 8]))
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 4), (2, 3), (3, 2), (2, 16), (8, 1)]))
    dim, value_dim = draw(
        st.sampled_from([(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512)])
    )
    keys = draw(st.sampled_from([1, 40, 128, 300, 700]))
    lengths = draw(st.lists(st.integers(0, keys), min_size=batch, max_size=batch))
    padded = draw(st.booleans())
    return step(
        lengths,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        keys=keys,
        dim=dim,
        value_dim=value_dim,
        new=new,
        starts=[draw(st.integers(0, length)) for length in lengths] if padded else None,
        sinks=draw(st.booleans()),
        window=draw(st.sampled_from([None, 1, 100])),
        softcap=draw(st.sampled_from([None, 3.0])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        seed=draw(st.integers(0, 2**16)),
    )


@settings(max_examples=16)
@given(made=steps())
def test_step_agrees_with_float64(made):
    expected = made.expected()
    for function in (interpreted, reference.decode_attention):
        out = function(*made.operands, **made.form)
        assert out.dtype == made.operands[0].dtype
        assert relative_l2(out, expected) <= TOLERANCE[str(out.dtype)]


@pytest.mark.slow
@settings(max_examples=30)
@given(made=steps(), seed=st.integers(0, 99), rolled=st.booleans(), shared=st.booleans())
def test_append_is_a_write_and_then_a_step(made, seed, rolled, shared):
    query, key, value, lengths, starts, sinks = made.operands
    new, keys = query.shape[2], key.shape[2]
    shared = shared and key.shape == value.shape
    draw = np.random.default_rng(seed)
    rows = [jnp.asarray(draw.standard_normal((*x.shape[:2], new, x.shape[3])), x.dtype) for x in (key, value)]
    places = draw.integers(0, keys, len(lengths)) if rolled else None
    written = [key] if shared else [key, value]
    for b, seen in enumerate(keys_seen(lengths, starts, made.form.get("window"), new, keys)):
        needed = [k for these in seen if len(these) for k in (these[0], these[-1])]
        first = int(lengths[b]) - new if places is None else places[b]
        for token, place in enumerate(range(first, first + new)):
            if needed and min(needed) <= place <= max(needed):
                written = [
                    x.at[b, :, place].set(row[b, :, token]) for x, row in zip(written, rows, strict=False)
                ]
    value, rows[1] = (None, None) if shared else (value, rows[1])
    expected = reference.decode_attention(
        query, written[0], None if shared else written[1], lengths, starts, sinks, **made.form
    )
    for function in (
        functools.partial(functions.append_attention, interpret=True),
        reference.append_attention,
    ):
        out, *caches = function(query, *rows, key, value, lengths, places, starts, sinks, **made.form)
        assert relative_l2(out, f64(expected)) <= TOLERANCE[str(out.dtype)]
        for cache, wanted in zip(caches, written, strict=True):
            np.testing.assert_array_equal(f64(cache), f64(wanted))


DIVISIONS = {
    "one-item": Config(1, 512, 2, 2, 1, VMEM),
    "short-blocks": Config(1, 128, 2, 3, 1, VMEM),
    "many-items": Config(2, 128, 5, 2, 1, VMEM),
    "all-heads": Config(4, 256, 4, 8, 1, VMEM),
    "chunks": Config(2, 128, 2, 2, 6, VMEM),
}


@pytest.mark.parametrize("group", [1, 3, 9])
@pytest.mark.parametrize("config", DIVISIONS.values(), ids=DIVISIONS)
def test_division_of_the_work_does_not_change_the_result(config, group):
    made = step([500, 0, 129], heads=4 * group, kv_heads=4, keys=512, dim=64, new=2, sinks=True)
    assert relative_l2(interpreted(*made.operands, config=config, **made.form), made.expected()) <= 1e-5


def test_each_token_may_have_its_own_keys():
    """[B, L] lengths and starts: attention within chunks, tokens that see nothing."""
    made = step(
        [[100, 130, 0], [5, 5, 300]],
        starts=[[0, 128, 0], [5, 2, 10]],
        heads=4, kv_heads=2, keys=300, dim=128, new=3,
    )  # fmt: skip
    assert relative_l2(interpreted(*made.operands, **made.form), made.expected()) <= 1e-5


def test_one_sequence_is_not_touched_by_anothers_nan():
    made = step([300, 20, 290], heads=4, kv_heads=1, keys=300, dim=128)
    expected = made.expected()
    query, key, value, *rest = made.operands
    value = value.at[0].set(jnp.nan)
    out = f64(interpreted(query, key, value, *rest, **made.form))
    assert np.isnan(out[0]).all()
    assert relative_l2(out[1:], expected[1:]) <= 1e-5


def test_gradients_are_those_of_the_reference():
    made = step([60, 0], heads=4, kv_heads=2, keys=64, dim=64, new=2, sinks=True, window=30, softcap=3.0)
    query, key, value, lengths, starts, sinks = made.operands

    def gradients(function):
        def loss(query, key, value, sinks):
            return jnp.sin(function(query, key, value, lengths, starts, sinks, **made.form)).sum()

        return jax.grad(loss, (0, 1, 2, 3))(query, key, value, sinks)

    for actual, expected in zip(gradients(interpreted), gradients(reference.decode_attention), strict=True):
        assert np.isfinite(expected).all()
        assert relative_l2(actual, f64(expected)) <= 1e-5


@pytest.mark.parametrize("tpu", VMEM_BYTES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("sequences", "keys", "new"), [(1, 131072, 1), (8, 4096, 8), (512, 1024, 8)])
def test_every_model_has_a_config_that_fits(case, tpu, sequences, keys, new):
    form = Shape(
        sequences, case.kv_heads, keys, case.heads // case.kv_heads * new, new, case.head_dim, case.head_dim,
        jnp.dtype("bfloat16"), case.sinks, case.head_dim < 128, case.head_dim < 128,
    )  # fmt: skip
    config = choose(form, tpu, case.window)
    assert config is not None
    assert vmem_bytes(form, config) <= config.vmem_bytes < VMEM_BYTES[tpu]


def test_what_has_no_room_in_vector_memory_runs_the_reference():
    made = step([9], heads=8, kv_heads=1, keys=16, dim=64)
    wide = jnp.zeros((1, 1, 16, 1 << 21), jnp.float32)
    query, key, _, *rest = made.operands
    assert functions.decode_attention(query, key, wide, *rest, tpu="v4").shape == (1, 8, 1, 1 << 21)
