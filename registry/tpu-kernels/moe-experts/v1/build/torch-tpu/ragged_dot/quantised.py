"""Weights of fewer bits: how they are held, and how their values come about, outside of a kernel and within.

*Int8*: integers, and float32 scales [G, B, N] that each serve K / B of a column's numbers.

*MXFP4*: of each 32 numbers along K, 4 bits each (E2M1: sign, two bits of exponent, one of mantissa) and one common
exponent of 8 bits (E8M0). Checkpoints store two numbers a byte, K last. A kernel wants K on the sublanes, and many
numbers by few operations of the vector unit, so `pack_mxfp4` rewrites them once, without loss:

- 128 numbers of a column are 16 words of 32 bits, *A* (8 words) and *B* (8). Words 0-7 of A and of B each yield 3
  *patterns*, halfwords with a number's bits where bfloat16 has sign, low exponent and first mantissa bit, by a shift
  and a mask; what is left of both are two more. In rows of K: A, A, A, both; B, B, B, both; 16 rows each.
- Zero and 0.5 trade codes, so that all numbers but zero are a pattern plus the exponent: no subnormal numbers, which
  a TPU may flush.
- Exponents are stored less one, as that is what is added.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .common import product
from .tiles import LANES, round_up

# Numbers of K that share an exponent; that are packed together; that one 32-bit word holds.
BLOCK, UNIT, PER_WORD = 32, 128, 8
# Exponents of a column come in multiples of this: XLA would copy other shapes to pad them.
EXPONENTS = 32
# Below, 0.5 would be a subnormal number; above, 6 would be too large.
LEAST_EXPONENT, MOST_EXPONENT = 2, 252
# Columns that one product takes.
COLUMNS = 1024

_PATTERN = 0x81C081C0  # sign, low two bits of the exponent, high bit of the mantissa, of two bfloat16 numbers
_ZERO = 0x40


def is_mxfp4(weights: Any) -> bool:
    """Whether weights are packed MXFP4: they are 32-bit words then."""
    return bool(weights.dtype == jnp.int32)


def packed_depth(k: int) -> int:
    """K as `pack_mxfp4` pads it."""
    return round_up(k, UNIT)


def exponents_of(k: int) -> int:
    """Exponents that `pack_mxfp4` gives a column."""
    return round_up(-(-k // BLOCK), EXPONENTS)


def pack_mxfp4(blocks: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """MXFP4 weights as the kernels read them, from the form that checkpoints store.

    Args:
      blocks: [G, N, K/32, 16] uint8, two codes a byte, the first in the low bits.
      scales: [G, N, K/32] uint8, exponents plus 127; held within 2..252.

    Returns: words [G, K'/8, N] int32, where K' is K rounded up to 128, with zeros after K; and exponents [G, B, N]
      uint8, where B is K/32 rounded up to 32, as XLA pads it in memory.
    """
    groups, n, count, _ = blocks.shape
    k = count * BLOCK
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).reshape(groups, n, k)
    codes = jnp.pad(codes, ((0, 0), (0, 0), (0, packed_depth(k) - k))).swapaxes(1, 2)
    codes = codes.reshape(groups, -1, 8, 8, 2, n).astype(jnp.uint32)  # G, unit, pattern, word, half, N
    magnitude = codes & 7
    sign = jnp.where(magnitude == 0, 0, codes >> 3)
    magnitude = jnp.where(magnitude < 2, magnitude ^ 1, magnitude)
    s, c = ([x[:, :, pattern] for pattern in range(8)] for x in (sign, magnitude))

    def placed(patterns: tuple[int, ...], *shifts: int) -> jax.Array:
        return sum(
            s[pattern] << (15 - shift) | c[pattern] << (6 - shift)
            for pattern, shift in zip(patterns, shifts, strict=True)
        )

    a, b = placed((0, 1, 2), 0, 3, 6), placed((4, 5, 6), 0, 3, 6)
    a, b, both = (x[:, :, :, 0] | x[:, :, :, 1] << 16 for x in (a, b, placed((3, 7), 1, 4)))
    # The bits of A and B that are free become what makes `_both` give the last two.
    wrong = both ^ _both(a, b)
    a |= (wrong & 0x48004800) | (wrong & 0x00240024) << 8
    b |= ((both ^ _both(a, b)) & 0x00D800D8) << 7
    words = jnp.stack([a, b], axis=2)  # G, unit, A or B, word, N
    exponents = jnp.clip(scales, LEAST_EXPONENT, MOST_EXPONENT) - 1
    exponents = jnp.pad(exponents, ((0, 0), (0, 0), (0, exponents_of(k) - count)))
    return (
        jax.lax.bitcast_convert_type(words.reshape(groups, -1, n), jnp.int32),
        exponents.swapaxes(1, 2).astype(jnp.uint8),
    )


def dequantise(weights: jax.Array, scale: jax.Array, *, k: int, transposed: bool) -> jax.Array:
    """The float32 values of weights: [G, K, N], or [G, N, K] if they are `transposed`.

    Args:
      weights: int8, or MXFP4 words.
      scale: [G, B, N] float32, or MXFP4 exponents.
      k: K.
    """
    if is_mxfp4(weights):
        return _dequantise_mxfp4(weights, scale)[:, :k]
    by_k = jnp.repeat(scale, k // scale.shape[1], axis=1)
    return weights.astype(jnp.float32) * (by_k.swapaxes(1, 2) if transposed else by_k)


def _dequantise_mxfp4(words: jax.Array, exponents: jax.Array) -> jax.Array:
    groups, rows, n = words.shape
    units = words.reshape(groups, -1, 2, 8, n)
    patterns = jnp.stack(_patterns(units[:, :, 0], units[:, :, 1]), axis=2)  # G, unit, pattern, word, N
    halves = jnp.stack([patterns & 0xFFFF, _shift(patterns, 16)], axis=4)  # then half, N
    codes = halves.reshape(groups, rows * PER_WORD, n)
    by_k = jnp.repeat(exponents.astype(jnp.int32), BLOCK, axis=1)[:, : codes.shape[1]]
    # Sign, exponent and mantissa are in the high halves of a float32 number's as well.
    bits = jnp.where(codes == _ZERO, 0, (codes + (by_k << 7)) << 16)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _shift(words: jax.Array, bits: int) -> jax.Array:
    return jax.lax.shift_right_logical(words, jnp.full_like(words, bits))


def _word(bits: int) -> int:
    """32 bits as a signed integer."""
    return bits - (1 << 32) if bits >> 31 else bits


def _patterns(a: jax.Array, b: jax.Array) -> tuple[jax.Array, ...]:
    """The eight pairs of patterns of words A and B, in the order of their rows."""
    mask, both = _word(_PATTERN), _both(a, b)
    in_a, in_b = (tuple((words << bits) & mask for bits in (0, 3, 6)) for words in (a, b))
    return (*in_a, (both << 1) & mask, *in_b, (both << 4) & mask)


def _both(a: jax.Array, b: jax.Array) -> jax.Array:
    """The words that hold the patterns of A and B together, once shifted by 1 and by 4."""
    return a ^ _shift(b, 7) ^ _shift(a, 8)


# Within a kernel.


def int8_product(rows: jax.Array, weights: jax.Array, scale: jax.Array, axis: int) -> jax.Array:
    """Rows [M, K] times int8 weights, whose axis `axis` is K, and scales [B, N]; f32."""
    blocks, k = scale.shape[0], rows.shape[1]
    total = None
    for i in range(blocks):
        depth = slice(i * (k // blocks), (i + 1) * (k // blocks))
        part = weights if blocks == 1 else weights[depth] if axis == 0 else weights[:, depth]
        values = product(rows[:, depth], part.astype(rows.dtype), (1, axis)) * scale[i : i + 1]
        total = values if total is None else total + values
    return total


def terms_of(exponents: int, columns: int) -> Any:
    """The scratch for what is added to patterns, for so many exponents of so many columns."""
    return pltpu.VMEM((exponents, round_up(columns, LANES)), jnp.int32)


def mxfp4_product(rows: jax.Array, words: Any, exponents: Any, terms: Any, *, interpreted: bool) -> jax.Array:
    """Rows [M, K'] times MXFP4 weights; f32 [M, N].

    Args:
      words: ref [K'/8, N]. exponents: ref [B, N].
      terms: ref of `terms_of`.
      interpreted: not compiled for a TPU.
    """
    n = words.shape[1]
    parts = []
    for at in range(0, n, COLUMNS):
        some = (slice(None), pl.ds(at, min(COLUMNS, n - at)))
        values = mxfp4_values(words.at[some], exponents.at[some], terms, interpreted=interpreted)
        parts.append(product(rows, values.astype(rows.dtype), (1, 0)))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def mxfp4_values(words: Any, exponents: Any, terms: Any, *, interpreted: bool) -> jax.Array:
    """Bfloat16 [K', N] of the refs that `mxfp4_product` has."""
    columns = words.shape[1]
    terms[: exponents.shape[0], :columns] = exponents[...].astype(jnp.int32) * 0x00800080
    tiles = []
    for unit in range(words.shape[0] // 16):
        a, b = (words[pl.ds(16 * unit + first, 8), :] for first in (0, 8))
        for i, pattern in enumerate(_patterns(a, b)):
            term = _on_all_sublanes(terms, 4 * unit + i // 2, columns, interpreted)
            is_zero = pltpu.bitcast(pattern, jnp.int16) == _ZERO
            bits = jnp.where(is_zero, jnp.int16(0), pltpu.bitcast(pattern + term, jnp.int16))
            tiles.append(pltpu.bitcast(bits, jnp.bfloat16))
    return jnp.concatenate(tiles, axis=0)


def _on_all_sublanes(ref: Any, row: int, columns: int, interpreted: bool) -> jax.Array:
    """Columns of one row of a ref, eight times. A TPU does so while it loads; the interpreter knows no stride of 0."""
    if interpreted:
        return jnp.broadcast_to(ref[pl.ds(row, 1), :columns], (8, columns))
    lanes = pl.ds(0, round_up(columns, LANES))
    return ref[pl.ds(row, 8, stride=0), lanes][:, :columns]
