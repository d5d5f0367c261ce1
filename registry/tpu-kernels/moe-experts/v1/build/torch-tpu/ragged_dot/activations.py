"""The activations of gated experts, by the name that transformers' ACT2FN gives them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


def gated(gate_up: jax.Array, activation: str) -> jax.Array:
    """`act(gate) * up` in f32, gate and up being the two halves of the columns of `gate_up` [R, 2I]."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return ACTIVATIONS[activation](gate) * up
