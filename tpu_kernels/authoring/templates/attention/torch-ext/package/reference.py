"""What the kernel computes, in plain jax.numpy: it is tested against this, and a CPU runs it."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def attention(query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool = False) -> jax.Array:
    """``softmax(query @ key.T / sqrt(D)) @ value``, computed in float32 or better."""
    wide = jnp.promote_types(query.dtype, jnp.float32)
    group = query.shape[1] // key.shape[1]
    q, k, v = query.astype(wide), *(jnp.repeat(x.astype(wide), group, axis=1) for x in (key, value))
    scores = jnp.einsum("bhld,bhsd->bhls", q, k, precision="highest") * query.shape[-1] ** -0.5
    if causal:
        scores = jnp.where(causal_mask(*scores.shape[2:]), scores, -jnp.inf)
    out = jnp.einsum("bhls,bhsd->bhld", jax.nn.softmax(scores), v, precision="highest")
    return out.astype(query.dtype)


def causal_mask(queries: int, keys: int) -> jax.Array:
    """[L, S]: the last query sees all keys, each one before it one less."""
    return jnp.arange(keys) <= jnp.arange(queries)[:, None] + (keys - queries)
