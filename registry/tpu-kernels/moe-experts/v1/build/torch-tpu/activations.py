"""What an expert does between its two products: activation, gate, clamp, in f32."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .ragged_dot.activations import ACTIVATIONS


@dataclasses.dataclass(frozen=True)
class Gate:
    """``act(gate) * (up + up_offset)``, or ``act(up)`` for experts without a gate.

    Attributes:
      activation: a name in `ACTIVATIONS`.
      gated: the first product has columns for gate and up; else for up only.
      interleaved: gate and up columns alternate; else all of the gate come first.
      alpha: for "silu", the factor of the sigmoid's argument: ``x * sigmoid(alpha * x)``.
      limit: gate is clamped to at most `limit`, up to within ``-limit..limit``; None: neither.
      up_offset: added to up.

    gpt-oss is ``Gate("silu", interleaved=True, alpha=1.702, limit=7.0, up_offset=1.0)``.
    """

    activation: str = "silu"
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def columns(self, intermediate: int) -> int:
        """Columns of the first product for `intermediate` columns of the second one's contraction."""
        return 2 * intermediate if self.gated else intermediate

    def combine(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """The expert's inner value from gate and up, f32 arrays of one shape."""
        if self.limit is not None:
            gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return self.activate(gate) * (up + self.up_offset if self.up_offset else up)

    def activate(self, x: jax.Array) -> jax.Array:
        """The activation of f32 values."""
        if self.activation == "silu" and self.alpha != 1.0:
            return x * jax.nn.sigmoid(self.alpha * x)
        return ACTIVATIONS[self.activation](x)

    def apply(self, rows: jax.Array) -> jax.Array:
        """The inner values [R, I] in f32 of the rows of the first product, [R, 2I] or, without a gate, [R, I]."""
        rows = rows.astype(jnp.float32)
        if not self.gated:
            return self.activate(rows)
        if self.interleaved:
            return self.combine(rows[:, ::2], rows[:, 1::2])
        return self.combine(*jnp.split(rows, 2, axis=1))
