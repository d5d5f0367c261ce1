"""The choice of a `Config`: from static shapes and the TPU generation alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import jax.numpy as jnp
from jax.experimental import pallas as pl

from .buffers import buffers_of, vmem_bytes
from .ragged_dot.tiles import LANES, round_up
from .shapes import BLOCK, Config, Shape

MIB = 1024 * 1024

# Vector memory of one core in bytes; the share of it that a kernel may ask for, as XLA may have staged an operand of
# a neighbouring op there; and what the compiler needs beside the buffers.
VMEM_BYTES = {"v4": 16 * MIB, "v5e": 128 * MIB, "v5p": 64 * MIB, "v6e": 128 * MIB, "tpu7x": 64 * MIB}
VMEM_SHARE = 0.875
COMPILER_SHARE, COMPILER_BYTES = 1 / 16, 4 * MIB

# A piece is about this long on the memory channel of a core (bytes a second): long enough that starting its DMA costs
# little beside it, short enough that little is left to do once the last one is there, a piece of down. For its
# bandwidth a v5p or TPU7x has more to do with it; but for many tokens, what a piece itself costs is more again.
# So much is to be on its way that a slow start of a piece is not felt.
GATE_UP_SECONDS = {"v4": 2e-6, "v5e": 2e-6, "v5p": 1e-6, "v6e": 2e-6, "tpu7x": 1e-6}
MANY_TOKENS_SECONDS, DOWN_SECONDS = 2e-6, 0.75e-6
SECONDS_AHEAD, MOST_AHEAD = 6e-6, 4  # experts
SLOT_SHARES = ((0.75, 1.0), (0.5, 1.0), (0.5, 0.5), (0.25, 0.25), (0.125, 0.125), (0.0, 0.0))
# Of the columns of a piece of gate_up: where gate and up alternate, half as many are left of them.
GATE_UP_MULTIPLE = 2 * LANES
UNEQUAL = 3
BANDWIDTH = {"v4": 1.2e12, "v5e": 0.82e12, "v5p": 2.77e12, "v6e": 1.64e12, "tpu7x": 3.69e12}

# Up to so many tokens every active expert computes all of them, as products hide behind weights. More are gathered,
# so many rows at a time as an expert is likely to have, in sixteens. Shapes do not say how many experts other ranks
# have: 2k^2 of them are about right, from Mixtral's 2 of 8 by gpt-oss's 4 of 32 to Qwen3's 8 of 128. Where even all
# pairs are few for the experts that are here, the fewest rows do. What a tile costs grows with its rows, but up to
# the most only where the matrix unit has 256 columns.
DENSE_TOKENS = {"v4": 64, "v5e": 128, "v5p": 64, "v6e": 256, "tpu7x": 128}
FEWEST_PAIRS, FEWEST_ROWS, FEW_ROWS = 8, 16, 32
MOST_ROWS = {"v4": 64, "v5e": 64, "v5p": 64, "v6e": 128, "tpu7x": 128}
DEVIATIONS = 2.5  # above the mean that most experts' numbers of tokens lie within
# Above, products cost more than weights, and a grouped matmul over sorted rows is the better program.
MOST_TOKENS = {"v4": 256, "v5e": 1024, "v5p": 512, "v6e": 1920, "tpu7x": 512}


def choose(shape: Shape, tpu: str) -> Config | None:
    """The config for `shape` on a generation; None where a grouped matmul should do it: too many tokens, or no room.

    Example:
      >>> shape = Shape(8, 8, 128, 2048, 768, 1536, jnp.bfloat16, jnp.bfloat16, jnp.float32, False, False, False, False)
      >>> choose(shape, "v6e").gate_up_piece
      768
    """
    # Narrower weights hide fewer products; making floats of MXFP4 takes as long as reading twice its bytes.
    narrower = min(2, int(8 * jnp.dtype(shape.dtype).itemsize / shape.weight_bits))
    gathers = shape.tokens > DENSE_TOKENS[tpu] // narrower
    # Tokens in f32 are not gathered: a product with a one-hot matrix would cost several passes.
    if shape.tokens > MOST_TOKENS[tpu] or (gathers and shape.dtype != jnp.bfloat16):
        return None
    # Gathered rows and widened weights together do not fit into the registers of a v4, nor what spills into its memory.
    if gathers and narrower > 1 and tpu == "v4":
        return None
    limit = int(VMEM_BYTES[tpu] * VMEM_SHARE)
    rows = _rows(shape, tpu) if gathers else 0
    for config in _candidates(shape, tpu, rows, limit):
        taken = vmem_bytes(buffers_of(shape, config)) + _floats_bytes(shape)
        if taken * (1 + COMPILER_SHARE) + COMPILER_BYTES <= limit:
            return config
    return None


def _rows(shape: Shape, tpu: str) -> int:
    if shape.tokens * shape.choices <= FEWEST_PAIRS * shape.experts:
        return FEWEST_ROWS
    mean = shape.tokens / (2 * shape.choices)
    likely = round_up(int(mean + DEVIATIONS * math.sqrt(mean)), FEWEST_ROWS)
    return min(max(likely, FEW_ROWS), MOST_ROWS[tpu])


def _floats_bytes(shape: Shape) -> int:
    """What the compiler keeps of MXFP4 weights that were made floats."""
    return shape.mxfp4 * shape.contraction(max(shape.hidden, shape.intermediate)) * BLOCK * 2


def _candidates(shape: Shape, tpu: str, rows: int, limit: int) -> Iterator[Config]:
    """Configs from the wanted one to ever less vector memory: fewer pieces ahead, then smaller ones."""
    gate_up_row, down_row = (int(k * shape.weight_bits / 8) for k in (shape.hidden, shape.intermediate))
    an_expert = shape.gate_up_columns * gate_up_row + shape.hidden * down_row
    ahead = min(pl.cdiv(int(SECONDS_AHEAD * BANDWIDTH[tpu]), an_expert), MOST_AHEAD)
    gate_up_seconds = MANY_TOKENS_SECONDS if rows > FEW_ROWS else GATE_UP_SECONDS[tpu]
    shrink = 1.0
    while True:
        piece_bytes = BANDWIDTH[tpu] * shrink
        gate_up_columns, down_columns = (
            min(seconds * piece_bytes / row, BLOCK if shape.mxfp4 else math.inf)
            for seconds, row in ((gate_up_seconds, gate_up_row), (DOWN_SECONDS, down_row))
        )
        gate_up_piece, gate_up_pieces = _pieces(shape.gate_up_columns, gate_up_columns, GATE_UP_MULTIPLE)
        down_piece, down_pieces = _pieces(shape.hidden, down_columns, LANES)
        slots = (max(2, ahead * pieces) for pieces in (gate_up_pieces, down_pieces))
        wanted = Config(gate_up_piece, down_piece, *slots, rows, limit)
        yield wanted
        # Those of down last: they wait while gate_up is consumed, and no DMA runs once all are full.
        for gate_up_share, down_share in SLOT_SHARES:
            yield dataclasses.replace(
                wanted,
                gate_up_slots=max(int(wanted.gate_up_slots * gate_up_share), min(2, gate_up_pieces)),
                down_slots=max(int(wanted.down_slots * down_share), min(2, down_pieces)),
            )
        if gate_up_piece <= GATE_UP_MULTIPLE and down_piece <= LANES:
            return
        shrink /= 2


def _pieces(length: int, wanted: float, multiple: int) -> tuple[int, int]:
    """The size and number of whole pieces of an axis, a multiple or all of it. What is left is shorter."""
    count = max(1, round(length / max(wanted, 1)))
    piece = round_up(pl.cdiv(length, count), multiple)
    # A few unequal pieces cost more than they hide.
    while 1 < count <= UNEQUAL and length % piece:
        count -= 1
        piece = round_up(pl.cdiv(length, count), multiple)
    return (length, 1) if piece >= length else (piece, length // piece)
