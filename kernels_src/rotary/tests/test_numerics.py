"""The rotation, interpreted in several blocks, against complex numbers in numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rotary import kernel, reference

settings.register_profile("kernels", deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("kernels")


def turned(x, angles, unsqueeze_dim):
    """The first elements of each head, as complex numbers, times those of the angles."""
    half = angles.shape[-1]
    factor = np.expand_dims(np.exp(1j * angles), unsqueeze_dim)
    pairs = (x[..., :half] + 1j * x[..., half : 2 * half]) * factor
    return np.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], axis=-1)


@settings(max_examples=8)
@given(
    batch=st.integers(1, 3),
    heads=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    tokens=st.sampled_from([1, 2, 37, 64]),
    width=st.sampled_from([32, 80, 128]),
    part=st.sampled_from([2, 4]),
    shared=st.booleans(),
    unsqueeze_dim=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**16),
)
def test_each_element_is_turned_by_its_angle(batch, heads, tokens, width, part, shared, unsqueeze_dim, seed):
    rng = np.random.default_rng(seed)
    shapes = [[batch, tokens, width] for _ in heads]
    for shape, count in zip(shapes, heads, strict=True):
        shape.insert(unsqueeze_dim, count)
    q, k = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    angles = rng.uniform(-9, 9, (1 if shared else batch, tokens, width // part))
    cos, sin = (jnp.asarray(np.concatenate([f(angles)] * 2, -1), jnp.float32) for f in (np.cos, np.sin))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_BLOCK_BYTES", 1)  # of 16 tokens each
        results = kernel.rotary(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, interpret=True)
    for result, x in zip(results, (q, k), strict=True):
        np.testing.assert_allclose(result, turned(x, angles, unsqueeze_dim), atol=2e-5)


def test_tables_have_gradients_too():
    rng = np.random.default_rng(0)
    q, k, cos, sin = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 4), (2, 5, 4))
    )

    def gradients(rotary, **settings):
        def loss(*arrays):
            return sum(jnp.sin(x).sum() for x in rotary(*arrays, **settings))

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, k, cos, sin)

    pairs = zip(gradients(kernel.rotary, interpret=True), gradients(reference.rotary), strict=True)
    for found, wanted in pairs:
        np.testing.assert_allclose(found, wanted, atol=1e-5)
