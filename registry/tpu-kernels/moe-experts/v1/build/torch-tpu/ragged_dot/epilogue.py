"""What becomes of a product before it leaves vector memory: bias, activation, gate."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .activations import ACTIVATIONS, gate_with
from .common import product
from .tiles import LANES


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What is done with the f32 columns of a product.

    Attributes:
      activation: a name in `ACTIVATIONS`, or "swiglu_clamped" with a gate; None for none.
      gating: None; "concatenated": the first half of the columns is the gate of the second; "interleaved": each
        even column is that of the odd one after it.
      bias: whether each group has a bias, added first.
      alpha, limit: of "swiglu_clamped".
    """

    activation: str | None = None
    gating: str | None = None
    bias: bool = False
    alpha: float = 1.0
    limit: float | None = None

    @property
    def branches(self) -> int:
        """Pieces of weights that make one piece of the result."""
        return 2 if self.gating == "concatenated" else 1

    @property
    def columns(self) -> int:
        """Columns of a piece of weights that make one of the result."""
        return 2 if self.gating == "interleaved" else 1

    def narrow(self, columns: int) -> int:
        """Columns of the result for `columns` of weights."""
        return columns if self.gating is None else columns // 2

    def apply(self, products: list[jax.Array], dtype: Any) -> jax.Array:
        """The result of one piece, in `dtype`, within a kernel.

        Args:
          products: f32, bias included: [rows, columns]; gate and up of the same columns, or one with 2 * columns.
        """
        if self.gating == "concatenated":
            return self._gate(*products).astype(dtype)
        (x,) = products
        if self.gating == "interleaved":
            # The gate meets its neighbour on even lanes; what the odd lanes hold is left out by `even_columns`.
            following = jnp.concatenate([x[:, 1:], x[:, :1]], axis=1)
            return even_columns(self._gate(x, following).astype(dtype))
        return (ACTIVATIONS[self.activation](x) if self.activation else x).astype(dtype)

    def whole(self, x: jax.Array) -> jax.Array:
        """The same on all columns of a product, outside of a kernel: [rows, columns], f32."""
        if self.gating == "concatenated":
            return self._gate(*jnp.split(x, 2, axis=-1))
        if self.gating == "interleaved":
            return self._gate(x[:, 0::2], x[:, 1::2])
        return ACTIVATIONS[self.activation](x) if self.activation else x

    def _gate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return gate_with(gate, up, self.activation, alpha=self.alpha, limit=self.limit)


def even_columns(x: jax.Array) -> jax.Array:
    """The even columns of `x` [rows, 2 * columns], by products with ones and zeros: exact, and no lane shuffles."""
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    # What the odd columns hold may be infinite, and that times zero is not zero.
    x = jnp.where(lane % 2 == 0, x, jnp.zeros_like(x))
    parts = []
    for at in range(0, x.shape[1], 2 * LANES):
        part = x[:, at : at + 2 * LANES]
        shape = (part.shape[1], part.shape[1] // 2)
        row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        parts.append(product(part, (row == 2 * column).astype(x.dtype), (1, 0)).astype(x.dtype))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
