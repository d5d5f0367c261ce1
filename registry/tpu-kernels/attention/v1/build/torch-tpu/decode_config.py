"""The choice of a `Config`: from static shapes and the TPU generation alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from .decode_kernel import scratch_of
from .shapes import LANES, SUBLANES, Config, Shape, round_up

MIB = 1024 * 1024

# Vector memory of one core in bytes; the share of it that a kernel may ask for, as XLA may have staged an operand of
# a neighbouring op there; and what the compiler needs beside the buffers.
VMEM_BYTES = {"v4": 16 * MIB, "v5e": 128 * MIB, "v5p": 64 * MIB, "v6e": 128 * MIB, "tpu7x": 64 * MIB}
VMEM_SHARE = 0.75
COMPILER_BYTES = 2 * MIB
# Cores that share one device's grid.
CORES = {"v4": 2, "v5e": 1, "v5p": 2, "v6e": 1, "tpu7x": 1}

# Bytes of a group, and of all that is on its way: enough that the channel to HBM is busy while one is computed. The
# more bytes come in a cycle, the more of them have to share the latency of a group's chain of operations; there an item
# also has the keys that fill a matrix unit of 256 columns.
GROUP_BYTES = {"v4": MIB, "v5e": MIB, "v5p": MIB, "v6e": MIB, "tpu7x": 2 * MIB}
LEAST_KEYS = {"v4": LANES, "v5e": LANES, "v5p": LANES, "v6e": LANES, "tpu7x": 2 * LANES}
BLOCK_BYTES, RING_BYTES, MOST_GROUPS = MIB // 2, 12 * MIB, 8
# Items of a group: more hide more latency, until their scores fill the registers.
ITEMS, ITEMS_OF_MANY_ROWS, MOST_HEADS = 8, 4, 8


def choose(shape: Shape, tpu: str, window: int | None) -> Config | None:
    """The config for `shape` on a generation; None where not even the smallest has room in vector memory.

    Args:
      shape: what the kernel is made for.
      tpu: the generation.
      window: a token sees at most so many keys: longer blocks would be mostly empty.

    Example:
      >>> shape = Shape(64, 1, 4096, 4, 1, 128, 128, jnp.bfloat16, False, False, False)
      >>> choose(shape, "v6e", None)
      Config(heads=1, block=512, unroll=4, ring=8, chunks=1, vmem_bytes=100663296)
    """
    limit = int(VMEM_BYTES[tpu] * VMEM_SHARE)
    for config in _candidates(shape, tpu, window, limit):
        if vmem_bytes(shape, config) + COMPILER_BYTES <= limit:
            return config
    return None


def _candidates(shape: Shape, tpu: str, window: int | None, limit: int) -> Iterator[Config]:
    """Configs from the wanted one to ever less vector memory: shorter rings, then more chunks."""
    cores, group = CORES[tpu], GROUP_BYTES[tpu]
    heads = max(
        h
        for h in range(1, min(shape.kv_heads, MOST_HEADS) + 1)
        if shape.kv_heads % h == 0 and (h == 1 or h * shape.key_bytes * LANES <= group)
    )
    key = heads * shape.key_bytes
    few = heads * shape.head_rows <= SUBLANES
    seen = shape.keys if window is None else min(shape.keys, window + shape.new - 1 + shape.granule - 1)
    block = max(LEAST_KEYS[tpu], min(group // (4 if few else 2), BLOCK_BYTES) // key // LANES * LANES)
    block = min(block, round_up(seen, LANES))
    unroll = min(ITEMS if few else ITEMS_OF_MANY_ROWS, max(2, group // (block * key)))
    ring = min(MOST_GROUPS, max(3, RING_BYTES // (unroll * block * key)))
    works = shape.sequences * (shape.kv_heads // heads)
    for chunks in (n for n in range(1, works + 1) if works % n == 0 and (n % cores == 0 or works % cores)):
        for groups in range(ring, 1, -1):
            yield Config(heads, block, unroll, groups, chunks, limit)
        yield Config(heads, LANES, 2, 2, chunks, limit)


def vmem_bytes(shape: Shape, config: Config) -> int:
    """Vector memory that the kernel's buffers take, padded to whole registers."""
    scratch = [each for each in scratch_of(shape, config).values() if each.memory_space == pltpu.VMEM]
    rows = config.tile_rows(shape)
    result = (config.works(shape), rows, shape.value_dim)
    sinks = [((shape.kv_heads // config.heads, rows, LANES), jnp.float32)] * shape.sinks
    # The result is written back while the next chunk is computed.
    blocks = [(each.shape, each.dtype) for each in scratch] + [(result, shape.dtype)] * 2 + sinks
    return sum(_padded_bytes(*each) for each in blocks)


def _padded_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    *lead, rows, lanes = shape
    size = jnp.dtype(dtype).itemsize
    return math.prod(lead) * round_up(rows, 32 // size) * round_up(lanes, LANES) * size
