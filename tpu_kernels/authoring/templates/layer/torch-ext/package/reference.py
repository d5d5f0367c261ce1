"""What the kernel computes, in plain jax.numpy: it is tested against this, and a CPU runs it."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, *, epsilon: float = 1e-6) -> jax.Array:
    """``x / sqrt(mean(x * x) + epsilon) * weight``, computed in float32 or better."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * scale * weight.astype(wide.dtype)).astype(x.dtype)
