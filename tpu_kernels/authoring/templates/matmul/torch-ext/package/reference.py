"""What the kernel computes, in plain jax.numpy: it is tested against this, and a CPU runs it."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def matmul(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """``lhs @ rhs``, computed in float32 or better."""
    wide = jnp.promote_types(lhs.dtype, jnp.float32)
    product = jnp.dot(lhs.astype(wide), rhs.astype(wide), precision=jax.lax.Precision.HIGHEST)
    return product.astype(lhs.dtype)
