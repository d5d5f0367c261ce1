"""What the kernels compute, in plain jax.numpy: one group, or one expert, after the other.

These are the definitions that the kernels are tested against, and what runs on a CPU. Nothing of a row outside
the groups, and nothing of the weights of a group without rows, reaches a result: not even a NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .activations import ACTIVATIONS, gate_with
from .quantised import dequantise


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None = None,
    bias: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    *,
    transpose_rhs: bool = False,
    preferred_element_type: Any = None,
    activation: str | None = None,
    gating: str | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
) -> jax.Array:
    """Grouped matmul: see `functions.ragged_dot`."""
    out_dtype = preferred_element_type or lhs.dtype
    columns = rhs.shape[1 if transpose_rhs else 2] // (2 if gating else 1)
    ends = jnp.minimum(jnp.cumsum(jnp.maximum(group_sizes, 0)), lhs.shape[0])
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    offset = _first_group(group_offset, group_sizes, rhs)
    row = jnp.arange(lhs.shape[0])[:, None]

    def group(total: jax.Array, item: tuple[Any, ...]) -> tuple[jax.Array, None]:
        index, weights, bias, scale = item
        start, end = starts[index + offset], ends[index + offset]

        def with_rows(total: jax.Array) -> jax.Array:
            mine = (row >= start) & (row < end)
            rows = jnp.where(mine, lhs, jnp.zeros_like(lhs)).astype(jnp.float32)
            values = weights
            if scale is not None:
                scales = scale if scale.ndim == 2 else scale[None]
                [values] = dequantise(weights[None], scales[None], k=lhs.shape[1], transposed=transpose_rhs)
            out = _matmul(rows, values.T if transpose_rhs else values)
            if bias is not None:
                out = out + bias.astype(jnp.float32)
            if gating:
                gate, up = (
                    jnp.split(out, 2, axis=1) if gating == "concatenated" else (out[:, 0::2], out[:, 1::2])
                )
                out = gate_with(gate, up, activation, alpha=alpha, limit=limit)
            elif activation:
                out = ACTIVATIONS[activation](out)
            return jnp.where(mine, out, total)

        return jax.lax.cond(end > start, with_rows, lambda total: total, total), None

    zeros = jnp.zeros((lhs.shape[0], columns), jnp.float32)
    groups = (jnp.arange(rhs.shape[0]), rhs, bias, rhs_scale)
    total, _ = jax.lax.scan(group, zeros, groups)
    return total.astype(out_dtype)


def _first_group(group_offset: jax.Array | None, group_sizes: jax.Array, rhs: jax.Array) -> jax.Array:
    if group_offset is None:
        return jnp.int32(0)
    return jnp.clip(group_offset.reshape(()), 0, group_sizes.shape[0] - rhs.shape[0])


def experts(
    hidden_states: jax.Array,
    top_k_index: jax.Array,
    top_k_weights: jax.Array,
    gate_up_proj: jax.Array,
    down_proj: jax.Array,
    *,
    activation: str = "silu",
    transposed: bool = False,
) -> jax.Array:
    """A mixture-of-experts layer: see `functions.experts`."""
    tokens = hidden_states.astype(jnp.float32)

    def one_expert(total: jax.Array, item: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        index, gate_up, down = item
        chosen = top_k_index == index  # [T, k]
        weight = jnp.sum(jnp.where(chosen, top_k_weights.astype(jnp.float32), 0), axis=1, keepdims=True)
        mine = jnp.any(chosen, axis=1, keepdims=True)

        def with_tokens(total: jax.Array) -> jax.Array:
            into = gate_up if transposed else gate_up.T
            back = down if transposed else down.T
            rows = jnp.where(mine, tokens, jnp.zeros_like(tokens))
            inner = gate_with(*jnp.split(_matmul(rows, into), 2, axis=1), activation)
            return total + jnp.where(mine, weight * _matmul(inner, back), 0)

        return jax.lax.cond(jnp.any(mine), with_tokens, lambda total: total, total), None

    experts_of_layer = (jnp.arange(gate_up_proj.shape[0]), gate_up_proj, down_proj)
    total, _ = jax.lax.scan(one_expert, jnp.zeros_like(tokens), experts_of_layer)
    return total.astype(hidden_states.dtype)


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
