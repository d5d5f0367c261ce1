"""What the kernel computes, in plain jax.numpy: it is tested against this, and a CPU runs it."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotary(
    q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, *, unsqueeze_dim: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Rotates the first R of the D elements of each head of `q` and `k`, computed in float32 or better.

    The element at place ``i < R / 2`` is rotated together with that at ``i + R / 2``.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    cos, sin = (jnp.expand_dims(table.astype(wide), unsqueeze_dim) for table in (cos, sin))
    width = cos.shape[-1]

    def rotated(x: jax.Array) -> jax.Array:
        turned, passed = x[..., :width].astype(wide), x[..., width:]
        first, second = jnp.split(turned, 2, axis=-1)
        turned = turned * cos + jnp.concatenate([-second, first], axis=-1) * sin
        return jnp.concatenate([turned.astype(x.dtype), passed], axis=-1)

    return rotated(q), rotated(k)
