"""Prefill and training attention, interpreted, against float64: results, log-sum-exp and gradients."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import flash, flash_backward, flash_forward, reference
from attention.cases import CASES
from attention.decode_config import VMEM_BYTES
from attention.flash_tiles import Blocks, Form, choose
from attention_oracle import TOLERANCE, attention_pass, f64, relative_l2
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

# A program a form: what fails is not shrunk, which would take minutes.
settings.register_profile(
    "kernels",
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
settings.load_profile("kernels")

interpreted = functools.partial(flash.flash_attention, interpret=True)
VMEM = 1 << 26


def check(function, made) -> None:
    """`function` on a pass against float64: the result, the log-sum-exp, every gradient."""
    out, log_sum, gradients = made.expected()
    query, key, value, starts, ends, sinks = made.operands
    given = (query, key, value) if sinks is None else (query, key, value, sinks)

    def attention(query, key, value, sinks=None):
        return function(query, key, value, starts, ends, sinks, **made.form)

    (actual, actual_log_sum), pullback = jax.vjp(attention, *given)
    tolerance = TOLERANCE[str(query.dtype)]
    assert actual.dtype == query.dtype
    assert relative_l2(actual, out) <= tolerance
    some = np.isfinite(log_sum)
    assert np.array_equal(np.isfinite(f64(actual_log_sum)), some)
    assert relative_l2(jnp.where(some, actual_log_sum, 0), np.where(some, log_sum, 0)) <= tolerance
    for name, got, expected in zip(
        ("query", "key", "value", "sinks"),
        pullback((made.grad, jnp.zeros_like(actual_log_sum))),
        gradients,
        strict=False,
    ):
        # Where a query sees few keys its gradient is a difference of numbers that nearly cancel.
        error = np.linalg.norm(f64(got) - expected)
        # The others are sums over all queries, which nearly cancel as well.
        terms = made.grad[..., 0].size if name == "sinks" else max(made.grad.size, expected.size)
        scale = max(np.linalg.norm(expected), 0.1 * np.sqrt(terms))
        assert error <= tolerance * scale, f"gradient of {name}"


@st.composite
def passes(draw, most: int):
    """Every feature together: padding on both sides, windows, queries that see nothing, ragged lengths."""
    batch = draw(st.sampled_from([1, 2]))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 2), (1, 3), (3, 1)]))
    dim, value_dim = draw(
        st.sampled_from([(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (64, 512)])
    )
    queries, keys = draw(st.integers(1, most)), draw(st.integers(1, most))
    causal = draw(st.booleans())
    place = st.integers(0, keys)
    bounds = {
        name: draw(st.none() | st.lists(place, min_size=batch, max_size=batch)) for name in ("starts", "ends")
    }
    return dict(
        batch=batch,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        queries=queries,
        keys=keys,
        dim=dim,
        value_dim=value_dim,
        sinks=draw(st.booleans()),
        causal=causal,
        window=draw(st.sampled_from([None, 1, 100])) if causal else None,
        softcap=draw(st.sampled_from([None, 3.0])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        seed=draw(st.integers(0, 2**16)),
        **bounds,
    )


@settings(max_examples=4)
@given(form=passes(most=200))
def test_pass_agrees_with_float64(form):
    check(interpreted, attention_pass(**form))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=150)
@given(form=passes(most=700))
def test_longer_passes_agree_with_float64(form):
    check(interpreted, attention_pass(**form))


# Blocks of several steps, tiles, heads, kv heads and chunks; and of heads that are a part of a kv head's.
DIVISIONS = {
    "several-kv-heads": (Blocks(128, 256, 128, 256, 4, 2, VMEM), 4, 2),
    "part-of-a-group": (Blocks(256, 128, 128, 512, 1, 1, VMEM), 2, 1),
}


@pytest.mark.parametrize(("blocks", "heads", "kv_heads"), DIVISIONS.values(), ids=DIVISIONS)
def test_division_of_the_work_does_not_change_the_result(blocks, heads, kv_heads):
    made = attention_pass(
        batch=2, heads=heads, kv_heads=kv_heads, queries=300, keys=520, dim=64, causal=True, window=150,
        sinks=True, starts=[0, 40], ends=[520, 400],
    )  # fmt: skip
    check(functools.partial(interpreted, blocks=blocks), made)
    check(reference.flash_attention, made)


def test_packed_sequences_see_their_own_keys():
    """Runs of each query: three sequences behind one another, causal within each."""
    lengths = [100, 1, 99]
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)[None]
    made = attention_pass(heads=2, kv_heads=1, queries=200, keys=200, dim=128, causal=True, starts=starts)
    check(interpreted, made)


def test_gradients_of_more_keys_than_have_room_come_piece_by_piece(monkeypatch):
    made = attention_pass(heads=2, kv_heads=1, queries=140, keys=300, dim=64, causal=True)
    whole = flash_backward.vmem_bytes

    def narrow(form, blocks):
        return whole(form, blocks) if form.keys <= 128 else 1 << 40

    monkeypatch.setattr(flash_backward, "vmem_bytes", narrow)
    check(interpreted, made)


def test_gradient_of_the_log_sum_exp():
    made = attention_pass(heads=2, kv_heads=1, queries=60, keys=60, dim=64, causal=True)

    def gradients(function):
        def loss(*operands):
            out, log_sum = function(*operands, **made.form)
            return (jnp.sin(out).sum(-1) * jnp.cos(log_sum)).sum()

        return jax.grad(loss, (0, 1, 2))(*made.operands[:3])

    for actual, expected in zip(gradients(interpreted), gradients(reference.flash_attention), strict=True):
        assert relative_l2(actual, f64(expected)) <= 1e-5


@pytest.mark.parametrize("tpu", VMEM_BYTES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_model_has_blocks_that_fit(case, tpu):
    form = Form(
        1, case.heads, case.kv_heads, 8192, 4096, case.head_dim, case.head_dim, jnp.dtype("bfloat16"),
        True, case.window, case.softcap, 1.0, case.sinks,
    )  # fmt: skip
    assert choose(dataclasses.replace(form, keys=131072), tpu, flash_forward.vmem_bytes) is not None
    assert choose(dataclasses.replace(form, keys=512), tpu, flash_backward.vmem_bytes) is not None
