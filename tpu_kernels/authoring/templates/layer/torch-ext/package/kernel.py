"""The Pallas kernel. Axis letters: M rows, N columns, of the input with all axes but the last in one.

A block is of whole rows: one pass over memory does both the mean and the scaling.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from . import reference
from .gradient import with_gradient_of
from .tiles import Tiles, choose

MOST_COLUMNS = 8192
# Of a block in float32; four of them, and as much again of temporaries, are less than every generation allows.
BLOCK_BYTES = 1 << 20


def rms_norm(
    x: jax.Array, weight: jax.Array, *, epsilon: float = 1e-6, tpu: str = "v6e", interpret: Any = False
) -> jax.Array:
    """Normalises rows by their root mean square.

    Args:
      x: [..., N], bf16 or f32, N of up to `MOST_COLUMNS`.
      weight: [N], bf16 or f32.
      epsilon: is added to the mean of the squares.
      tpu: generation that the kernel is made for.
      interpret: as in `pallas_call`.

    Returns: [..., N] in the dtype of `x`. Computed in f32.
    """
    kernel = functools.partial(_of_any_shape, epsilon=epsilon, tpu=tpu, interpret=interpret)
    return with_gradient_of(functools.partial(reference.rms_norm, epsilon=epsilon), kernel)(x, weight)


def _of_any_shape(x: jax.Array, weight: jax.Array, *, epsilon: float, tpu: str, interpret: Any) -> jax.Array:
    if x.size == 0:
        return x
    n = x.shape[-1]
    arrays = {"x": x.reshape(-1, n), "weight": weight.reshape(1, n)}
    offered = [Tiles(rows, n) for rows in (256, 128, 64, 32, 16) if rows * n * 4 <= BLOCK_BYTES]
    tiles = choose(_rms_norm, arrays, {"m": x.size // n, "n": n}, offered, tpu)
    return _rms_norm(**arrays, tiles=tiles, epsilon=epsilon, interpret=interpret).reshape(x.shape)


def _rms_norm(
    x: jax.Array, weight: jax.Array, *, tiles: Tiles, epsilon: float = 1e-6, interpret: Any = False
) -> jax.Array:
    m, n = x.shape
    rows = min(tiles.rows, m)
    block = pl.BlockSpec((rows, n), lambda i: (i, 0))
    return pl.pallas_call(
        functools.partial(_block, epsilon=epsilon),
        grid=(pl.cdiv(m, rows),),
        in_specs=[block, pl.BlockSpec((1, n), lambda i: (0, 0))],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        cost_estimate=pl.CostEstimate(
            flops=4 * m * n, transcendentals=m, bytes_accessed=2 * m * n * x.dtype.itemsize
        ),
        name="rms_norm",
        interpret=interpret,
    )(x, weight)


def _block(x_ref: Any, weight_ref: Any, out_ref: Any, *, epsilon: float) -> None:
    x = x_ref[...].astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + epsilon)
    out_ref[...] = (x * scale * weight_ref[...].astype(jnp.float32)).astype(out_ref.dtype)
