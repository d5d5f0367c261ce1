"""Gated activations, interpreted in several blocks, against numpy."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
from gated_activation import kernel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

settings.register_profile("kernels", deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("kernels")

ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


@settings(max_examples=12)
@given(
    rows=st.sampled_from([1, 31, 70]),
    columns=st.sampled_from([1, 130, 256, 384]),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    concatenated=st.booleans(),
    scales=st.sampled_from([None, "rows", "columns"]),
    seed=st.integers(0, 2**16),
)
def test_results_are_those_of_numpy(rows, columns, activation, concatenated, scales, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 2 * columns)).astype(np.float32)
    scale = None
    if scales is not None:
        x = np.clip(x * 40, -128, 127).astype(np.int8)
        scale = rng.uniform(0.01, 0.1, (rows, 1) if scales == "rows" else 2 * columns).astype(np.float32)
    gate, up = np.split(x, 2, axis=1)
    halves = [None, None] if scale is None else [scale] * 2 if scales == "rows" else np.split(scale, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_BLOCK_ELEMENTS", 32 * 128)
        patch.setattr(kernel, "_MOST_COLUMNS", 128)
        if concatenated:
            given = [None if each is None else jnp.asarray(each) for each in (x, scale)]
            result = kernel.act_and_mul(*given, activation=activation, interpret=True)
        else:
            given = [None if each is None else jnp.asarray(each) for each in (gate, up, *halves)]
            result = kernel.gated_activation(*given, activation=activation, interpret=True)
    gate, up = (
        each.astype(float) * (1 if by is None else by) for each, by in zip((gate, up), halves, strict=True)
    )
    np.testing.assert_allclose(result, ACTIVATIONS[activation](gate) * up, rtol=1e-5, atol=2e-5)
