"""The choice of experts, interpreted, against stable sorting in numpy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router import kernel, reference

settings.register_profile("kernels", deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("kernels")

NAN = float("nan")


def best(values, count):
    """Places of the largest values: NaN before all, of equal ones the first."""
    return np.argsort(np.where(np.isnan(values), -np.inf, -values), axis=-1, kind="stable")[..., :count]


def chosen(choice, top_k, n_group, topk_group, group_top):
    if topk_group < n_group:
        grouped = choice.reshape(len(choice), n_group, -1)
        scores = np.take_along_axis(grouped, best(grouped, group_top), -1).sum(-1)
        allowed = np.zeros(scores.shape, bool)
        np.put_along_axis(allowed, best(scores, topk_group), True, -1)
        choice = np.where(allowed[..., None], grouped, -np.inf).reshape(choice.shape)
    return best(choice, top_k)


@st.composite
def calls(draw):
    experts = draw(st.sampled_from([8, 60, 128, 512]))
    n_group = draw(st.sampled_from([1, 2, 4]))
    grouping = {
        "n_group": n_group,
        "topk_group": draw(st.integers(1, n_group)),
        "group_top": draw(st.integers(1, 2)),
    }
    allowed = experts // n_group * grouping["topk_group"]
    return experts, {
        "top_k": draw(st.integers(1, min(16, allowed))),
        "scoring_func": draw(st.sampled_from(["softmax", "sigmoid"])),
        "norm_topk_prob": draw(st.booleans()),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        **grouping,
    }


@settings(max_examples=10)
@given(
    call=calls(),
    tokens=st.sampled_from([1, 5, 258]),
    levels=st.sampled_from([1, 3, 1000]),
    dtype=st.sampled_from([jnp.bfloat16, jnp.float32]),
    biased=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_experts_and_weights_are_those_of_a_stable_sort(call, tokens, levels, dtype, biased, seed):
    experts, static = call
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(rng.integers(0, levels, (tokens, experts)) * (4 / levels), dtype)
    bias = jnp.asarray(rng.integers(0, 3, experts) / 2, jnp.float32) if biased else None
    weights, index = kernel.route(logits, bias, **static, interpret=True)

    scores = np.asarray(reference.scores_of(logits, static["scoring_func"]))
    choice = scores if bias is None else scores + np.asarray(bias)
    grouping = (static["n_group"], static["topk_group"], static["group_top"])
    expected = chosen(choice, static["top_k"], *grouping)
    np.testing.assert_array_equal(index, expected)
    wanted = np.take_along_axis(scores, expected, -1).astype(np.float64)
    if static["norm_topk_prob"]:
        wanted /= wanted.sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, wanted * static["routed_scaling_factor"], rtol=1e-5)
    np.testing.assert_array_equal(reference.route(logits, bias, **static)[1], expected)


def test_rows_with_nan_choose_different_experts_that_exist():
    logits = jnp.asarray([[0.0, NAN, 1.0, NAN, -np.inf, 2.0], [NAN] * 6, [-np.inf] * 5 + [0.0]])
    weights, index = kernel.route(logits, scoring_func="sigmoid", top_k=4, interpret=True)
    np.testing.assert_array_equal(index, [[1, 3, 5, 2], [0, 1, 2, 3], [5, 0, 1, 2]])
    assert np.isnan(weights[:2]).all()
    np.testing.assert_array_equal(weights[2], [1, 0, 0, 0])
