"""Float64 oracles in numpy, loops and all, and the measure of error: relative L2."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def f64(x: jax.Array) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(jnp.float32)).astype(np.float64)


def rows_of_groups(sizes: list[int], groups: int, offset: int = 0) -> list[slice]:
    ends = np.cumsum(sizes)
    return [slice(int(ends[g + offset] - sizes[g + offset]), int(ends[g + offset])) for g in range(groups)]


def ragged_dot(lhs, rhs, sizes: list[int], offset: int = 0, *, transpose_rhs: bool = False) -> np.ndarray:
    lhs, rhs = f64(lhs), f64(rhs)
    rhs = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    out = np.zeros((lhs.shape[0], rhs.shape[2]))
    for group, rows in enumerate(rows_of_groups(sizes, rhs.shape[0], offset)):
        out[rows] = lhs[rows] @ rhs[group]
    return out


def gradients(lhs, rhs, grad, sizes: list[int], offset: int = 0, *, transpose_rhs: bool = False):
    lhs, rhs, grad = f64(lhs), f64(rhs), f64(grad)
    d_lhs, d_rhs = np.zeros_like(lhs), np.zeros_like(rhs)
    for group, rows in enumerate(rows_of_groups(sizes, rhs.shape[0], offset)):
        matrix = rhs[group] if transpose_rhs else rhs[group].T
        d_lhs[rows] = grad[rows] @ matrix
        product = lhs[rows].T @ grad[rows]
        d_rhs[group] = product.T if transpose_rhs else product
    return d_lhs, d_rhs


def relative_l2(actual, expected: np.ndarray) -> float:
    actual = f64(actual)
    assert actual.shape == expected.shape
    norm = np.linalg.norm(expected)
    return float(np.linalg.norm(actual - expected) / norm) if norm else float(np.abs(actual).max(initial=0))
