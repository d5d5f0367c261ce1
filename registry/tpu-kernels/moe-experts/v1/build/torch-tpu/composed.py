"""The layer by two grouped matmuls over rows sorted by expert: for many tokens, and for the gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .activations import Gate
from .ragged_dot import functions as ragged
from .ragged_dot.common import product


def composed_experts(
    hidden_states: jax.Array,
    top_k_index: jax.Array,
    top_k_weights: jax.Array,
    gate_up_proj: jax.Array,
    down_proj: jax.Array,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    gate_up_scale: jax.Array | None = None,
    down_scale: jax.Array | None = None,
    *,
    gate: Gate,
    transposed: bool,
    tpu: str,
    interpret: Any,
) -> jax.Array:
    """The experts of a layer: see `functions.fused_experts`."""
    count, hidden = gate_up_proj.shape[0], hidden_states.shape[1]
    # Other ranks' experts sort last and are in no group.
    top_k_index = jnp.where(top_k_index < 0, count, top_k_index)
    if gate_up_bias is None and gate_up_scale is None and gate == Gate(gate.activation):
        return ragged.experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            gate_up_proj,
            down_proj,
            activation=gate.activation,
            transposed=transposed,
            tpu=tpu,
            interpret=interpret,
        )
    tokens, choices = top_k_index.shape
    expert = top_k_index.reshape(-1)
    order = jnp.argsort(expert, stable=True)
    inverse = jnp.argsort(order)
    group_sizes = jnp.sum(expert[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    here = (expert[order] < count)[:, None]

    def linear(
        rows: jax.Array, weight: jax.Array, bias: jax.Array | None, scale: jax.Array | None
    ) -> jax.Array:
        return ragged.ragged_dot(
            rows,
            weight,
            group_sizes,
            None,
            bias,
            scale,
            transpose_rhs=not transposed,
            preferred_element_type=jnp.float32,
            tpu=tpu,
            interpret=interpret,
        )

    rows = ragged.permute(jnp.repeat(hidden_states, choices, axis=0), order, inverse)
    inner = gate.apply(linear(rows, gate_up_proj, gate_up_bias, gate_up_scale)).astype(hidden_states.dtype)
    # A gate may turn the zeros of a row that is not here into anything.
    out = ragged.permute(jnp.where(here, linear(inner, down_proj, down_bias, down_scale), 0), inverse, order)
    weighted = out.reshape(tokens, choices, hidden) * top_k_weights[..., None].astype(jnp.float32)
    return weighted.sum(axis=1).astype(hidden_states.dtype)


def shared_expert(
    hidden_states: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    weights: jax.Array,
    *,
    gate: Gate,
    transposed: bool,
) -> jax.Array:
    """One expert for all tokens, by XLA's products: [T, H] f32."""
    axis = 0 if transposed else 1
    inner = gate.apply(product(hidden_states, gate_up, (1, axis))).astype(hidden_states.dtype)
    return product(inner, down, (1, axis)) * weights[:, None].astype(jnp.float32)
