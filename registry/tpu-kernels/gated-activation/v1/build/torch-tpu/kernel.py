"""The Pallas kernel. Axis letters: M rows, N columns of the result, with all axes but the last in one.

Pallas brings the next blocks of `gate` and `up` to VMEM, and the last result back, while one is computed. Where both
are the halves of one array, that array is given twice, and the blocks of `up` are those from the middle on.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from . import reference
from .gradient import with_gradient_of

# Six blocks of these in float32 are in VMEM at a time: 12 MiB, which every generation allows.
_BLOCK_ELEMENTS, _MOST_COLUMNS = 1 << 19, 2048
# Rows and columns of a register of int8, the largest.
_ROWS, _LANES = 32, 128


def gated_activation(
    gate: jax.Array,
    up: jax.Array,
    gate_scale: jax.Array | None = None,
    up_scale: jax.Array | None = None,
    *,
    activation: str = "silu",
    tpu: str = "v6e",
    interpret: Any = False,
) -> jax.Array:
    """``act(gate) * up``.

    Args:
      gate, up: [..., N], bf16 or f32; int8 with scales.
      gate_scale, up_scale: of int8: [..., 1], one a row, or [N], one a column; bf16 or f32.
      activation: one of `reference.ACTIVATIONS`.
      tpu: generation that the kernel is made for.
      interpret: as in `pallas_call`.

    Returns: [..., N] in the dtype of `gate`, or where that is int8 of its scale. Computed in f32.
    """

    def kernel(
        gate: jax.Array, up: jax.Array, gate_scale: jax.Array | None, up_scale: jax.Array | None
    ) -> jax.Array:
        return _of_any_shape([gate, up], [gate_scale, up_scale], activation, interpret)

    of = functools.partial(reference.gated_activation, activation=activation)
    return with_gradient_of(of, kernel)(gate, up, gate_scale, up_scale)


def act_and_mul(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    activation: str = "silu",
    tpu: str = "v6e",
    interpret: Any = False,
) -> jax.Array:
    """`gated_activation` of the two halves of ``x``, [..., 2N]; a scale of int8 is [..., 1] or [2N]."""

    def kernel(x: jax.Array, scale: jax.Array | None) -> jax.Array:
        # Else no block begins in the middle.
        parts = list(jnp.split(x, 2, axis=-1)) if x.shape[-1] % (2 * _LANES) else [x]
        return _of_any_shape(parts, list(reference.halves(scale)), activation, interpret)

    of = functools.partial(reference.act_and_mul, activation=activation)
    return with_gradient_of(of, kernel)(x, scale)


def _of_any_shape(
    parts: list[jax.Array], scales: list[jax.Array | None], activation: str, interpret: Any
) -> jax.Array:
    """Of `gate` and `up`, or of an array whose halves they are."""
    x, dtype = parts[0], reference.result_dtype(parts[0], scales[0])
    n = x.shape[-1] // (1 if len(parts) == 2 else 2)
    shape = (*x.shape[:-1], n)
    if x.size == 0:
        return jnp.zeros(shape, dtype)
    rows = [part.reshape(-1, part.shape[-1]) for part in parts]
    flat = [None if scale is None else scale.reshape(-1, scale.shape[-1]) for scale in scales]
    return _call(rows, flat, n, dtype, activation, interpret).reshape(shape)


def _call(
    parts: list[jax.Array],
    scales: list[jax.Array | None],
    n: int,
    dtype: Any,
    activation: str,
    interpret: Any,
) -> jax.Array:
    m, one = parts[0].shape[0], len(parts) == 1
    columns = _columns(n) if one else min(n, _MOST_COLUMNS)
    rows = min(_BLOCK_ELEMENTS // columns // _ROWS * _ROWS, m)
    middle = n // columns if one else 0

    def block_of(scale: jax.Array) -> pl.BlockSpec:
        if scale.shape == (m, 1):
            return pl.BlockSpec((rows, 1), lambda i, j: (i, 0))
        return pl.BlockSpec((1, columns), lambda i, j: (0, j))

    given = [scale for scale in scales if scale is not None]
    gate, up = (parts * 2)[:2]
    return pl.pallas_call(
        functools.partial(_block, activation=activation),
        grid=(pl.cdiv(m, rows), pl.cdiv(n, columns)),
        in_specs=[
            pl.BlockSpec((rows, columns), lambda i, j: (i, j)),
            pl.BlockSpec((rows, columns), lambda i, j: (i, j + middle)),
            *map(block_of, given),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), dtype),
        cost_estimate=pl.CostEstimate(
            flops=5 * m * n,
            transcendentals=m * n,
            bytes_accessed=m * n * (2 * gate.dtype.itemsize + jnp.dtype(dtype).itemsize),
        ),
        name="gated_activation",
        interpret=interpret,
    )(gate, up, *given)


def _columns(n: int) -> int:
    """The widest block that a half of `n` columns consists of."""
    return max(width for width in range(_LANES, min(n, _MOST_COLUMNS) + 1, _LANES) if n % width == 0)


def _block(gate_ref: Any, up_ref: Any, *refs: Any, activation: str) -> None:
    *scale_refs, out_ref = refs
    gate_scale, up_scale = (ref[...] for ref in scale_refs) if scale_refs else (None, None)
    gate = reference.scaled(gate_ref[...], gate_scale, jnp.float32)
    up = reference.scaled(up_ref[...], up_scale, jnp.float32)
    out_ref[...] = (reference.ACTIVATIONS[activation](gate) * up).astype(out_ref.dtype)
