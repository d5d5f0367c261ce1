"""The kernel's buffers, and the vector memory they take."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from .ragged_dot.quantised import PER_WORD, exponents_of, terms_of
from .ragged_dot.tiles import LANES, round_up
from .shapes import BLOCK, Config, Shape

F32 = jnp.float32
# Of the copies that are no pieces of weights: those made whole at the start, then these two.
COUNTS_ARRIVED, OUT_ARRIVED, SEMAPHORES = 7, 8, 9
# Columns that one activation takes.
ACTIVATION_BLOCK = 768


def buffers_of(shape: Shape, config: Config) -> dict[str, Any]:
    """The kernel's scratch shapes by name."""
    tokens, hidden = shape.tokens, shape.hidden
    x_width, h_width = shape.contraction(hidden), shape.contraction(shape.intermediate)
    columns, rows = config.columns(tokens), config.rows
    wide, tiles = (rows, -(-columns // rows)) if rows else (columns, 1)
    experts = round_up(shape.all_experts, LANES)
    choices = (shape.choices, tokens) if shape.choices_first else (tokens, shape.choices)
    vmem, dma = pltpu.VMEM, pltpu.SemaphoreType.DMA

    buffers = {
        "index": vmem(choices, jnp.int32),
        "weights": vmem(choices, shape.routing_dtype),
        "x": vmem((tokens, hidden), shape.dtype),
        "inner": vmem(
            (tiles, wide, shape.gate_up_columns)
            if shape.halves
            else (1, wide, min(BLOCK, config.gate_up_piece)),
            F32,
        ),
        "h": vmem((tiles, wide, h_width), shape.dtype),
        "sums": vmem((columns, hidden), F32),
        "result": vmem((tokens, hidden), shape.dtype),
        "coefficients_by_expert": vmem((experts, columns), F32),
        "coefficients": vmem((columns, experts), F32),
        "coefficient": vmem((columns, LANES), F32),
        "counts_vector": vmem((1, experts), jnp.int32),
        "counts": pltpu.SMEM((1, experts), jnp.int32),
        "active": pltpu.SMEM((shape.all_experts + 1,), jnp.int32),
        "arrived": dma((SEMAPHORES,)),
    }
    for name, length, contraction, contraction_first, piece, slots in (
        (
            "gate_up",
            shape.gate_up_columns,
            x_width,
            shape.gate_up_contraction_first,
            config.gate_up_piece,
            config.gate_up_slots,
        ),
        ("down", hidden, h_width, shape.down_contraction_first, config.down_piece, config.down_slots),
    ):
        whole, rest = divmod(length, piece)
        parts = [(name, piece, slots)]
        if rest:
            parts.append((f"{name}_rest", rest, max(1, slots // whole)))
        rows_of_weights = contraction // PER_WORD if shape.mxfp4 else contraction
        for part, size, count in parts:
            one = (rows_of_weights, size) if contraction_first else (size, rows_of_weights)
            if shape.mxfp4:
                buffers[f"{part}_exponents"] = vmem((count, exponents_of(contraction), size), jnp.uint8)
            buffers[f"{part}_slots"] = vmem((count, *one), shape.weight_dtype)
            buffers[f"{part}_arrived"] = dma((count,))
    if shape.shared:
        buffers["shared_weights"] = vmem((1, tokens), F32)
    if (columns, x_width) != (tokens, hidden):
        buffers["x_padded"] = vmem((columns, x_width), shape.dtype)
    if shape.mxfp4:
        buffers["terms"] = terms_of(exponents_of(max(x_width, h_width)), BLOCK)
    for name in shape.vectors:
        length = shape.gate_up_columns if name.startswith("gate_up") else hidden
        buffers[name] = vmem((shape.experts, length), F32 if name.endswith("scale") else shape.dtype)
        buffers[f"{name}_rows"] = vmem((shape.experts, length), F32)
        buffers[f"{name}_row"] = vmem((1, length), F32)
    if rows:
        buffers |= {
            "ranks": vmem((experts, columns), F32),
            "not_finite": vmem((columns, LANES), F32),
            "places": vmem((tiles, columns, 2 * rows), jnp.bfloat16),
            "gathered": vmem((tiles, rows, x_width), shape.dtype),
            "tile_coefficients": vmem((tiles, rows, LANES), F32),
        }
    return buffers


def vmem_bytes(buffers: dict[str, Any]) -> int:
    """Vector memory that `buffers` take, padded to whole registers."""
    return sum(_padded_bytes(b) for b in buffers.values() if b.memory_space == pltpu.VMEM)


def _padded_bytes(buffer: Any) -> int:
    *lead, rows, lanes = buffer.shape
    size = jnp.dtype(buffer.dtype).itemsize
    return math.prod(lead) * round_up(rows, 32 // size) * round_up(lanes, LANES) * size
