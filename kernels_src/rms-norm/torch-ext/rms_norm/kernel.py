"""The Pallas kernel. Axis letters: M rows, N columns, of the input with all axes but the last in one.

A block is of whole rows, so that one pass over memory does the sum with the residual, the mean and the scaling::

    x (+ residual) ──> rounded sum ──> its mean square ──> * rsqrt * (offset + weight) ──> result
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
# Of a block in float32. With a residual there are eight of them, and temporaries; every generation allows 16 MiB.
BLOCK_BYTES = 1 << 20


def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    *,
    epsilon: float = 1e-6,
    offset: float = 0.0,
    tpu: str = "v6e",
    interpret: Any = False,
) -> jax.Array:
    """Normalises rows by their root mean square.

    Args:
      x: [..., N], bf16 or f32, N of up to `MOST_COLUMNS`.
      weight: [N], bf16 or f32.
      epsilon: is added to the mean of the squares.
      offset: is added to the weight: 1 for zero-centred ones.
      tpu: generation that the kernel is made for.
      interpret: as in `pallas_call`.

    Returns: [..., N] in the dtype of `x`. Computed in f32.
    """

    def kernel(x: jax.Array, weight: jax.Array) -> jax.Array:
        [normed] = _of_any_shape([x], weight, epsilon=epsilon, offset=offset, tpu=tpu, interpret=interpret)
        return normed

    return with_gradient_of(functools.partial(reference.rms_norm, epsilon=epsilon, offset=offset), kernel)(
        x, weight
    )


def add_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    *,
    epsilon: float = 1e-6,
    offset: float = 0.0,
    tpu: str = "v6e",
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The norm of ``x + residual``, and that sum: see `rms_norm`; both [..., N] in the dtype of `x`."""

    def kernel(x: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        normed, total = _of_any_shape(
            [x, residual], weight, epsilon=epsilon, offset=offset, tpu=tpu, interpret=interpret
        )
        return normed, total

    return with_gradient_of(
        functools.partial(reference.add_rms_norm, epsilon=epsilon, offset=offset), kernel
    )(x, residual, weight)


def _of_any_shape(
    parts: list[jax.Array], weight: jax.Array, *, epsilon: float, offset: float, tpu: str, interpret: Any
) -> list[jax.Array]:
    shape, n = parts[0].shape, parts[0].shape[-1]
    if parts[0].size == 0:
        return parts
    rows = [part.reshape(-1, n) for part in parts]
    arrays = dict(zip(("x", "residual"), rows, strict=False)) | {"weight": weight.reshape(1, n)}
    kernel = _rms_norm if len(parts) == 1 else _add_rms_norm
    offered = [Tiles(size, n) for size in (256, 128, 64, 32, 16) if size * n * 4 <= BLOCK_BYTES]
    tiles = choose(kernel, arrays, {"m": rows[0].shape[0], "n": n}, offered, tpu)
    results = kernel(**arrays, tiles=tiles, epsilon=epsilon, offset=offset, interpret=interpret)
    return [result.reshape(shape) for result in results]


def _rms_norm(x: jax.Array, weight: jax.Array, **settings: Any) -> list[jax.Array]:
    return _call([x], weight, "rms_norm", **settings)


def _add_rms_norm(x: jax.Array, residual: jax.Array, weight: jax.Array, **settings: Any) -> list[jax.Array]:
    return _call([x, residual], weight, "add_rms_norm", **settings)


def _call(
    parts: list[jax.Array],
    weight: jax.Array,
    name: str,
    *,
    tiles: Tiles,
    epsilon: float = 1e-6,
    offset: float = 0.0,
    interpret: Any = False,
) -> list[jax.Array]:
    """As many results as there are parts: the norm of their sum and, of two, the sum."""
    (m, n), dtype, count = parts[0].shape, parts[0].dtype, len(parts)
    rows = min(tiles.rows, m)
    block = pl.BlockSpec((rows, n), lambda i: (i, 0))
    results = pl.pallas_call(
        functools.partial(_block, count=count, epsilon=epsilon, offset=offset),
        grid=(pl.cdiv(m, rows),),
        in_specs=[block] * count + [pl.BlockSpec((1, n), lambda i: (0, 0))],
        out_specs=[block] * count,
        out_shape=[jax.ShapeDtypeStruct((m, n), dtype)] * count,
        cost_estimate=pl.CostEstimate(
            flops=(3 + count) * m * n, transcendentals=m, bytes_accessed=2 * count * m * n * dtype.itemsize
        ),
        name=name,
        interpret=interpret,
    )(*parts, weight)
    return list(results)


def _block(*refs: Any, count: int, epsilon: float, offset: float) -> None:
    part_refs, weight_ref, out_ref = refs[:count], refs[count], refs[count + 1]
    total = part_refs[0][...]
    if count == 2:
        total = total + part_refs[1][...]
        refs[count + 2][...] = total
    x = total.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + epsilon)
    out_ref[...] = (x * scale * (offset + weight_ref[...].astype(jnp.float32))).astype(out_ref.dtype)
