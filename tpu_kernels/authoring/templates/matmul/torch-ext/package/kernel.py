"""The Pallas kernel. Axis letters: M rows, K contraction, N columns.

For each tile of the result, the grid's last axis walks along the contraction::

    lhs [rows, depth], rhs [depth, columns] ──> sum [rows, columns] f32, in VMEM ──(last step)──> result
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from . import reference
from .gradient import with_gradient_of
from .tiles import Tiles, choose

# Blocks of at most 512 x 512 float32, two of each array and the sum: 7 MiB, which every generation allows.
OFFERED = (Tiles(512, 512, 512), Tiles(256, 512, 512), Tiles(512, 256, 512), Tiles(64, 512, 1024))


def matmul(lhs: jax.Array, rhs: jax.Array, *, tpu: str = "v6e", interpret: Any = False) -> jax.Array:
    """Matrix product.

    Args:
      lhs: [M, K], bf16 or f32.
      rhs: [K, N], the dtype of `lhs`.
      tpu: generation that the kernel is made for.
      interpret: as in `pallas_call`.

    Returns: [M, N] in the dtype of `lhs`. Sums are in f32.
    """
    return with_gradient_of(reference.matmul, functools.partial(_of_any_sizes, tpu=tpu, interpret=interpret))(
        lhs, rhs
    )


def _of_any_sizes(lhs: jax.Array, rhs: jax.Array, *, tpu: str, interpret: Any) -> jax.Array:
    (m, k), n = lhs.shape, rhs.shape[1]
    if 0 in (m, k, n):
        return jnp.zeros((m, n), lhs.dtype)
    tiles = choose(_matmul, {"lhs": lhs, "rhs": rhs}, {"m": m, "k": k, "n": n}, OFFERED, tpu)
    return _matmul(lhs, rhs, tiles=tiles, interpret=interpret)


def _matmul(lhs: jax.Array, rhs: jax.Array, *, tiles: Tiles, interpret: Any = False) -> jax.Array:
    (m, k), n = lhs.shape, rhs.shape[1]
    rows, columns, depth = min(tiles.rows, m), min(tiles.columns, n), min(tiles.depth, k)
    # What lies past the end of a block is undefined: harmless in rows and columns, which are not written, but not in
    # the contraction.
    padding = -k % depth
    lhs, rhs = jnp.pad(lhs, ((0, 0), (0, padding))), jnp.pad(rhs, ((0, padding), (0, 0)))
    return pl.pallas_call(
        _block,
        grid=(pl.cdiv(m, rows), pl.cdiv(n, columns), (k + padding) // depth),
        in_specs=[
            pl.BlockSpec((rows, depth), lambda i, j, step: (i, step)),
            pl.BlockSpec((depth, columns), lambda i, j, step: (step, j)),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda i, j, step: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), lhs.dtype),
        scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * k * n,
            transcendentals=0,
            bytes_accessed=(m * k + k * n + m * n) * lhs.dtype.itemsize,
        ),
        name="matmul",
        interpret=interpret,
    )(lhs, rhs)


def _block(lhs_ref: Any, rhs_ref: Any, out_ref: Any, sum_ref: Any) -> None:
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    # For float32 the products are exact, too: the default would round the factors to bfloat16.
    precision = jax.lax.Precision.HIGHEST if lhs_ref.dtype == jnp.float32 else None
    sum_ref[...] += jnp.dot(
        lhs_ref[...], rhs_ref[...], precision=precision, preferred_element_type=jnp.float32
    )

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)
