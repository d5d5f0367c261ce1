"""What the layer computes, in plain jax.numpy: one expert after the other.

This is the definition that the kernel is tested against, and what runs on a CPU. Nothing of an expert without tokens
reaches a result: not even a NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .activations import Gate
from .ragged_dot.quantised import dequantise


def fused_experts(
    hidden_states: jax.Array,
    top_k_index: jax.Array,
    top_k_weights: jax.Array,
    gate_up_proj: jax.Array,
    down_proj: jax.Array,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    gate_up_scale: jax.Array | None = None,
    down_scale: jax.Array | None = None,
    shared_gate_up: jax.Array | None = None,
    shared_down: jax.Array | None = None,
    shared_weights: jax.Array | None = None,
    *,
    transposed: bool = False,
    activation: str = "silu",
    gated: bool = True,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> jax.Array:
    """A mixture-of-experts layer: see `functions.fused_experts`."""
    gate = Gate(activation, gated, interleaved, alpha, limit, up_offset)
    count = gate_up_proj.shape[0]
    tokens = hidden_states.astype(jnp.float32)
    biases = (jnp.zeros((count, 1)),) * 2 if gate_up_bias is None else (gate_up_bias, down_bias)

    def weights(values: jax.Array, scale: jax.Array | None, rows: jax.Array) -> jax.Array:
        """One expert's, [K, N]."""
        if scale is not None:
            scale = scale if scale.ndim == 2 else scale[None]
            [values] = dequantise(values[None], scale[None], k=rows.shape[1], transposed=not transposed)
        return values if transposed else values.T

    def one_expert(total: jax.Array, item: tuple[Any, ...]) -> tuple[jax.Array, None]:
        index, into, back, into_bias, back_bias, into_scale, back_scale = item
        chosen = top_k_index == index  # [T, k]
        weight = jnp.sum(jnp.where(chosen, top_k_weights.astype(jnp.float32), 0), axis=1, keepdims=True)
        mine = jnp.any(chosen, axis=1, keepdims=True)

        def with_tokens(total: jax.Array) -> jax.Array:
            rows = jnp.where(mine, tokens, 0)
            inner = gate.apply(_matmul(rows, weights(into, into_scale, rows)) + into_bias)
            out = _matmul(inner, weights(back, back_scale, inner)) + back_bias
            return total + jnp.where(mine, weight * out, 0)

        return jax.lax.cond(jnp.any(mine), with_tokens, lambda total: total, total), None

    experts = (jnp.arange(count), gate_up_proj, down_proj, *biases, gate_up_scale, down_scale)
    total, _ = jax.lax.scan(one_expert, jnp.zeros_like(tokens), experts)
    if shared_gate_up is not None:
        into, back = (w if transposed else w.T for w in (shared_gate_up, shared_down))
        out = _matmul(gate.apply(_matmul(tokens, into)), back)
        total += out if shared_weights is None else out * shared_weights[:, None].astype(jnp.float32)
    return total.astype(hidden_states.dtype)


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
