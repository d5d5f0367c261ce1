"""What the kernel computes, in plain jax.numpy: it is tested against this, and a CPU runs it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# By the names of transformers' ACT2FN, but for "gelu_tanh", which is its "gelu_pytorch_tanh".
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
}


def gated_activation(
    gate: jax.Array,
    up: jax.Array,
    gate_scale: jax.Array | None = None,
    up_scale: jax.Array | None = None,
    *,
    activation: str = "silu",
) -> jax.Array:
    """``act(gate * gate_scale) * (up * up_scale)``, computed in float32 or better."""
    dtype = result_dtype(gate, gate_scale)
    wide = jnp.promote_types(dtype, jnp.float32)
    gate, up = scaled(gate, gate_scale, wide), scaled(up, up_scale, wide)
    return (ACTIVATIONS[activation](gate) * up).astype(dtype)


def act_and_mul(x: jax.Array, scale: jax.Array | None = None, *, activation: str = "silu") -> jax.Array:
    """The same of the two halves of `x`."""
    gate, up = jnp.split(x, 2, axis=-1)
    return gated_activation(gate, up, *halves(scale), activation=activation)


def scaled(x: jax.Array, scale: jax.Array | None, dtype: Any) -> jax.Array:
    """``x * scale``, in a dtype."""
    return x.astype(dtype) if scale is None else x.astype(dtype) * scale.astype(dtype)


def halves(scale: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    """The scales of both halves of a concatenated input: those of rows are the same."""
    if scale is None or scale.shape[-1] == 1:
        return scale, scale
    first, second = jnp.split(scale, 2, axis=-1)
    return first, second


def result_dtype(x: jax.Array, scale: jax.Array | None) -> Any:
    """The input's dtype, or where that is quantised its scale's."""
    return x.dtype if scale is None else scale.dtype
