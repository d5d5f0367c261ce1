"""What the kernel computes, in plain jax.numpy: it is tested against this, and a CPU runs it."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def experts(
    hidden_states: jax.Array,
    top_k_index: jax.Array,
    top_k_weights: jax.Array,
    gate_up_proj: jax.Array,
    down_proj: jax.Array,
) -> jax.Array:
    """Each token through all experts, summed by weight; computed in float32 or better."""
    wide = jnp.promote_types(hidden_states.dtype, jnp.float32)
    share = routing(top_k_index, top_k_weights.astype(wide), gate_up_proj.shape[0])
    x, into, back = (a.astype(wide) for a in (hidden_states, gate_up_proj, down_proj))
    gate, up = jnp.split(jnp.einsum("th,ech->etc", x, into, precision="highest"), 2, axis=2)
    out = jnp.einsum("eti,ehi->eth", jax.nn.silu(gate) * up, back, precision="highest")
    return jnp.einsum("te,eth->th", share, out, precision="highest").astype(hidden_states.dtype)


def routing(index: jax.Array, weights: jax.Array, experts: int) -> jax.Array:
    """[T, E]: the weight of each expert for each token; an index past the experts counts for none."""
    chosen = index[:, :, None] == jnp.arange(experts)
    return jnp.sum(jnp.where(chosen, weights[:, :, None], 0), axis=1)
