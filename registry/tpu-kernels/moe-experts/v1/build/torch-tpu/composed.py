"""The layer by two grouped matmuls over rows sorted by expert: for many tokens, and for the gradient."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .activations import Gate
from .ragged_dot import functions as ragged
from .ragged_dot.activations import CLAMPED
from .ragged_dot.common import product as dense_product
from .ragged_dot.tiles import LANES


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
    product = functools.partial(ragged.ragged_dot, transpose_rhs=not transposed, tpu=tpu, interpret=interpret)
    inner_size = gate_up_proj.shape[2 if transposed else 1] // (2 if gate.gated else 1)
    # Of other sizes `ragged_dot` would leave the bias to XLA as well.
    epilogue = None if gate_up_bias is not None and inner_size % LANES else epilogue_of(gate)

    def layer(rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
        into = (rows, gate_up_proj, group_sizes, None, gate_up_bias, gate_up_scale)
        if epilogue is None:
            inner = gate.apply(product(*into, preferred_element_type=jnp.float32)).astype(rows.dtype)
        else:
            inner = product(*into, **epilogue)
        return product(inner, down_proj, group_sizes, None, down_bias, down_scale)

    count = gate_up_proj.shape[0]
    # Other ranks' experts sort last and are in no group.
    top_k_index = jnp.where(top_k_index < 0, count, top_k_index)
    return ragged.routed(hidden_states, top_k_index, top_k_weights, count, layer)


def epilogue_of(gate: Gate) -> dict[str, Any] | None:
    """What `ragged_dot` is told to do the same in its call; None where it cannot.

    Example:
      >>> epilogue_of(Gate("gelu"))
      {'activation': 'gelu', 'gating': 'concatenated'}
    """
    if not gate.gated:
        return {"activation": gate.activation}
    gating = "interleaved" if gate.interleaved else "concatenated"
    if (gate.alpha, gate.limit, gate.up_offset) == (1.0, None, 0.0):
        return {"activation": gate.activation, "gating": gating}
    if (gate.activation, gate.up_offset) == ("silu", 1.0):
        return {"activation": CLAMPED, "gating": gating, "alpha": gate.alpha, "limit": gate.limit}
    return None


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
    inner = gate.apply(dense_product(hidden_states, gate_up, (1, axis))).astype(hidden_states.dtype)
    return dense_product(inner, down, (1, axis)) * weights[:, None].astype(jnp.float32)
