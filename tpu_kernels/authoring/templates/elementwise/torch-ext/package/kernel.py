"""The Pallas kernel. Axis letters: M rows, N columns, of the tensors with all axes but the last in one.

Pallas brings the next blocks of `gate` and `up` to VMEM, and the last result back, while one is computed.
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

# Six blocks of at most 256 x 2048 float32 are in VMEM at a time: 12 MiB, which every generation allows.
OFFERED = (Tiles(256, 2048), Tiles(512, 512), Tiles(256, 512), Tiles(64, 2048))


def swiglu(gate: jax.Array, up: jax.Array, *, tpu: str = "v6e", interpret: Any = False) -> jax.Array:
    """Gated SiLU.

    Args:
      gate, up: [..., N], bf16 or f32.
      tpu: generation that the kernel is made for.
      interpret: as in `pallas_call`.

    Returns: [..., N] in the dtype of `gate`. Computed in f32.
    """
    return with_gradient_of(reference.swiglu, functools.partial(_of_any_shape, tpu=tpu, interpret=interpret))(
        gate, up
    )


def _of_any_shape(gate: jax.Array, up: jax.Array, *, tpu: str, interpret: Any) -> jax.Array:
    if gate.size == 0:
        return gate
    columns = gate.shape[-1] if gate.ndim else 1
    arrays = {name: array.reshape(-1, columns) for name, array in (("gate", gate), ("up", up))}
    sizes = {"m": gate.size // columns, "n": columns}
    tiles = choose(_swiglu, arrays, sizes, OFFERED, tpu)
    return _swiglu(**arrays, tiles=tiles, interpret=interpret).reshape(gate.shape)


def _swiglu(gate: jax.Array, up: jax.Array, *, tiles: Tiles, interpret: Any = False) -> jax.Array:
    m, n = gate.shape
    # A block may be as large as the array; else it is of whole registers.
    rows, columns = min(tiles.rows, m), min(tiles.columns, n)
    block = pl.BlockSpec((rows, columns), lambda i, j: (i, j))
    return pl.pallas_call(
        _block,
        grid=(pl.cdiv(m, rows), pl.cdiv(n, columns)),
        in_specs=[block, block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((m, n), gate.dtype),
        cost_estimate=pl.CostEstimate(
            flops=5 * m * n, transcendentals=m * n, bytes_accessed=3 * m * n * gate.dtype.itemsize
        ),
        name="swiglu",
        interpret=interpret,
    )(gate, up)


def _block(gate_ref: Any, up_ref: Any, out_ref: Any) -> None:
    gate = gate_ref[...].astype(jnp.float32)
    out_ref[...] = (jax.nn.silu(gate) * up_ref[...].astype(jnp.float32)).astype(out_ref.dtype)
