"""The activations of experts, by the name that transformers' ACT2FN gives them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
}
# gpt-oss's gate: both sides clamped, and one added to `up`.
CLAMPED = "swiglu_clamped"


def gate_with(
    gate: jax.Array, up: jax.Array, activation: str, *, alpha: float = 1.0, limit: float | None = None
) -> jax.Array:
    """`act(gate) * up`; for `CLAMPED`, ``(up + 1) * gate * sigmoid(alpha * gate)`` of values within `limit`, if any."""
    if activation != CLAMPED:
        return ACTIVATIONS[activation](gate) * up
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)
