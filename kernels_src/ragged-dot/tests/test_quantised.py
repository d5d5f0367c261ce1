"""Quantised weights: their values, and products with them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.experimental import pallas as pl
from ragged_dot import functions, quantised, reference
from ragged_dot.quantised import LEAST_EXPONENT, MOST_EXPONENT, dequantise, pack_mxfp4

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
SIZES = [7, 0, 21]


def values_of(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[G, K, N], float64, of what a checkpoint stores."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape[:2], -1)
    return (E2M1[codes] * np.exp2(np.repeat(scales, 32, axis=2) - 127.0)).swapaxes(1, 2)


def stored(rng: np.random.Generator, groups: int, k: int, n: int, low: int, high: int):
    """Random blocks and scales as a checkpoint stores them."""
    shape = (groups, n, k // 32)
    return rng.integers(0, 256, (*shape, 16), np.uint8), rng.integers(low, high + 1, shape).astype(np.uint8)


@pytest.mark.parametrize("k", [32, 160, 256])
def test_packing_loses_nothing(k):
    blocks, scales = stored(np.random.default_rng(k), 2, k, 64, LEAST_EXPONENT, MOST_EXPONENT)
    words, exponents = pack_mxfp4(jnp.asarray(blocks), jnp.asarray(scales))
    values = dequantise(words, exponents, k=k, transposed=False)
    np.testing.assert_array_equal(oracle.f64(values), values_of(blocks, scales))
    padded = quantised.packed_depth(k)
    assert not dequantise(words, exponents, k=padded, transposed=False)[:, k:].any()


def test_the_kernel_makes_the_same_values():
    """Every code with the exponents at both ends; none of them by way of a subnormal number."""
    rng = np.random.default_rng(0)
    blocks, _ = stored(rng, 1, 256, 128, 0, 0)
    scales = rng.choice([LEAST_EXPONENT, 3, 126, 127, 128, MOST_EXPONENT], (1, 128, 8)).astype(np.uint8)
    words, exponents = (x[0] for x in pack_mxfp4(jnp.asarray(blocks), jnp.asarray(scales)))

    def kernel(words, exponents, out, terms):
        out[...] = quantised.mxfp4_values(words, exponents, terms, interpreted=True)

    out = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((256, 128), jnp.bfloat16),
        scratch_shapes=[quantised.terms_of(*exponents.shape)],
        interpret=True,
    )(words, exponents)
    np.testing.assert_array_equal(oracle.f64(out), values_of(blocks, scales)[0])


# K, N, stored as [G, N, K], parts of K with scales of their own (none: MXFP4), gate
WEIGHTS = {
    "int8": (128, 192, False, 1, None),
    "int8-transposed-odd": (100, 36, True, 1, None),
    "int8-parts": (256, 192, False, 2, None),
    "int8-parts-transposed-gate": (256, 2 * 64, True, 2, "concatenated"),
    "mxfp4": (160, 200, False, None, None),
    "mxfp4-gate": (128, 2 * 128, False, None, "concatenated"),
}


def weights_of(name: str, groups: int = len(SIZES)):
    """Weights and scale, and their float64 values [G, K, N]."""
    rng = np.random.default_rng(0)
    k, n, transposed, parts, _ = WEIGHTS[name]
    if parts is None:
        blocks, scales = stored(rng, groups, k, n, 119, 123)
        return *pack_mxfp4(jnp.asarray(blocks), jnp.asarray(scales)), values_of(blocks, scales)
    integers = rng.integers(-127, 128, (groups, k, n))
    scale = jnp.asarray(rng.lognormal(size=(groups, parts, n)) / 60 / k**0.5, jnp.float32)
    values = integers * np.repeat(oracle.f64(scale), k // parts, axis=1)
    weights = jnp.asarray(integers.swapaxes(1, 2) if transposed else integers, jnp.int8)
    return weights, scale[:, 0] if parts == 1 else scale, values


# Of these, others in the list do all that they do.
SLOW = ("int8", "int8-parts")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in WEIGHTS]
)
def test_product_and_gradients_agree_with_float64(name):
    k, n, transposed, _, gating = WEIGHTS[name]
    weights, scale, values = weights_of(name)
    rng = np.random.default_rng(1)
    m, columns = 40, n // 2 if gating else n
    lhs, grad = (jnp.asarray(rng.standard_normal((m, c)), jnp.bfloat16) for c in (k, columns))
    static = {"activation": "silu", "gating": gating} if gating else {}

    # Of the dequantised weights, in float32: their own tests hold that against float64.
    def plain(lhs):
        rhs = jnp.asarray(values, jnp.float32)
        return reference.ragged_dot(lhs, rhs, jnp.asarray(SIZES), **static)

    expected, pullback = jax.vjp(plain, lhs.astype(jnp.float32))
    [expected_grad] = pullback(grad.astype(jnp.float32))
    for function in (functools.partial(functions.ragged_dot, interpret=True), reference.ragged_dot):
        out, pullback = jax.vjp(
            lambda lhs, function=function: function(
                lhs, weights, jnp.asarray(SIZES), rhs_scale=scale, transpose_rhs=transposed, **static
            ),
            lhs,
        )
        assert oracle.relative_l2(out, oracle.f64(expected)) <= 1e-2
        assert oracle.relative_l2(pullback(grad)[0], oracle.f64(expected_grad)) <= 1e-2


def test_scales_of_int8_have_a_gradient():
    weights, scale, _ = weights_of("int8-parts")
    lhs = jnp.asarray(np.random.default_rng(2).standard_normal((40, 256)), jnp.float32)

    def total(function, scale):
        return function(lhs, weights, jnp.asarray(SIZES), rhs_scale=scale).sum()

    actual = jax.grad(functools.partial(total, functools.partial(functions.ragged_dot, interpret=True)))(
        scale
    )
    expected = jax.grad(functools.partial(total, reference.ragged_dot))(scale)
    assert oracle.relative_l2(actual, oracle.f64(expected)) <= 1e-5
