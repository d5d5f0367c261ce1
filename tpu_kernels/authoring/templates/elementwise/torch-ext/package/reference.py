"""What the kernel computes, in plain jax.numpy: it is tested against this, and a CPU runs it."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """``silu(gate) * up``, computed in float32 or better."""
    wide = jnp.promote_types(gate.dtype, jnp.float32)
    return (jax.nn.silu(gate.astype(wide)) * up.astype(wide)).astype(gate.dtype)
