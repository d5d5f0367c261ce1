"""What the kernel computes, in plain jax.numpy: it is tested against this, and a CPU runs it."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, *, epsilon: float = 1e-6, offset: float = 0.0) -> jax.Array:
    """``x / sqrt(mean(x * x) + epsilon) * (offset + weight)``, computed in float32 or better."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * scale * (offset + weight.astype(wide.dtype))).astype(x.dtype)


def add_rms_norm(
    x: jax.Array, residual: jax.Array, weight: jax.Array, *, epsilon: float = 1e-6, offset: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """The norm of ``x + residual``, which is rounded first, and that sum."""
    total = x + residual
    return rms_norm(total, weight, epsilon=epsilon, offset=offset), total
