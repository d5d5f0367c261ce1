"""How a product is cut: the sizes that each kernel works with, chosen from the shapes alone.

A config is taken from a small model of the chip: what moves through HBM, what the matrix unit takes, and what fits
into vector memory. It only ranks configs; times come from `tpu-kernels simulate` or from a TPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

MIB = 1024 * 1024
LANES = 128


@dataclasses.dataclass(frozen=True)
class Chip:
    """What the choice of a config knows about one core of a TPU generation.

    Attributes:
      vmem_bytes: vector memory.
      flops: bf16 operations a second.
      bandwidth: HBM bytes a second that a kernel attains.
      push_rows: loading a tile of weights into the matrix unit takes as long as multiplying this many rows.
    """

    vmem_bytes: int
    flops: float
    bandwidth: float
    push_rows: int


CHIPS = {
    "v4": Chip(16 * MIB, 138e12, 1.0e12, 16),
    "v5e": Chip(128 * MIB, 197e12, 0.71e12, 16),
    "v5p": Chip(64 * MIB, 230e12, 2.38e12, 16),
    "v6e": Chip(128 * MIB, 918e12, 1.43e12, 64),
    "tpu7x": Chip(64 * MIB, 1150e12, 3.17e12, 64),
}
# The share of vector memory that a kernel may ask for: the compiler keeps some for itself, and XLA may have staged
# an operand of a neighbouring op.
VMEM_SHARE = 0.9
COMPILER_BYTES = 2 * MIB
# What the compiler's schedules show (simulated, v6e): a narrow piece of weights takes the rows from vector memory
# again, as long as multiplying this many columns; a chunk, and a piece in it, cost this much beside their products; and
# sums of several chunks are loaded and stored at this rate.
NARROW_COLUMNS = 64
CHUNK_SECONDS = 0.15e-6
PIECE_SECONDS = 0.05e-6
SUMS_BANDWIDTH = 6e12
# Weights that are on their way at any time, at least: what HBM moves within its latency.
IN_FLIGHT_BYTES = 4 * MIB
# The compiler unrolls a product: multiplications in all of a program's products, at most.
LONGEST_PROGRAM = 4e9
PROGRAM_BYTES = 4e-4  # about 5 bundles of 64 bytes for a million multiplications
MOST_ROWS = 1280
INTERPRETED_ROWS = 64
MOST_WEIGHT_ROWS = 1536


@dataclasses.dataclass(frozen=True)
class Config:
    """How `forward.gmm` cuts a product.

    Attributes:
      rows: rows of a chunk, a multiple of the row tile.
      columns: columns of a piece of weights; a multiple of 128, or N.
      depth: part of K in a piece; K, or where that does not fit a divisor of it that is a multiple of 128.
      slots: pieces of weights that vector memory holds.
      buffers: chunks of lhs that it holds; of the result, it holds two.
      by_group: the chunks of a group share its weights, all of which the slots must hold; else every chunk fetches
        them.
      resident: vector memory holds all of lhs and of the result.
      vmem_bytes: vector memory that the kernel may use.
    """

    rows: int
    columns: int
    depth: int
    slots: int
    buffers: int
    by_group: bool
    resident: bool
    vmem_bytes: int


@dataclasses.dataclass(frozen=True)
class WeightConfig:
    """How `weight_gradient.gmm_weights` cuts a product.

    Attributes:
      rows: rows of a chunk, a multiple of `height`.
      height: rows are multiplied in multiples of this.
      depth, columns: of K and of N in one pass over the rows; a divisor of K, and N or a divisor of it, multiples
        of 128 where they are not the whole axis.
      piece: of `depth` in one product; it, or a multiple of 128.
      buffers: chunks of lhs, and of grad, that vector memory holds.
      stages: pieces of the result on their way out.
      vmem_bytes: vector memory that the kernel may use.
    """

    rows: int
    height: int
    depth: int
    columns: int
    piece: int
    buffers: int
    stages: int
    vmem_bytes: int


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def row_tile(dtype: Any) -> int:
    """Rows that vector memory packs together: slices of rows start at multiples of it.

    Example:
      >>> row_tile(jnp.bfloat16), row_tile(jnp.float32)
      (16, 8)
    """
    return 32 // jnp.dtype(dtype).itemsize


def powers_of_two(most: int, least: int) -> list[int]:
    """The powers of two from `most` down to `least`, both of which are one."""
    return [most >> i for i in range((most // least).bit_length())]


def default_config(
    m: int,
    k: int,
    n: int,
    groups: int,
    dtype: Any,
    *,
    tpu: str = "v6e",
    transpose_rhs: bool = True,
    out_dtype: Any = None,
    wide: int = 1,
) -> Config:
    """The config for a grouped product, from its shapes and the vector memory of `tpu`.

    Args:
      m, k, n, groups: axes of ``[m, k] x [groups, k, n]``.
      dtype: of both operands.
      tpu: generation: v4, v5e, v5p, v6e or tpu7x.
      transpose_rhs: the weights are stored as [groups, n, k].
      out_dtype: of the result; that of the operands when None.
      wide: columns of weights for each column of the result: 2 with a gate.

    Example:
      >>> default_config(8, 2048, 1536, 128, jnp.bfloat16, tpu="v6e").resident
      True
    """
    out_size = jnp.dtype(out_dtype or dtype).itemsize
    shape = _Shape(m, k, n, groups, jnp.dtype(dtype).itemsize, out_size, transpose_rhs, wide)
    chip = CHIPS[tpu]
    budget = int(chip.vmem_bytes * VMEM_SHARE)
    candidates = list(_configs(shape, budget))
    fitting = [c for c in candidates if _forward_bytes(c, shape) <= budget]
    # Where nothing fits, the smallest is tried all the same: the compiler's message tells by how much it fails.
    return (
        min(fitting, key=lambda c: _forward_seconds(c, shape, chip))
        if fitting
        else min(candidates, key=lambda c: _forward_bytes(c, shape))
    )


def interpreted_config(m: int, k: int, n: int, dtype: Any) -> Config:
    """For ``interpret=True``: the shortest program, as every line of it is compiled for the CPU.

    Example:
      >>> interpreted_config(8, 64, 128, jnp.bfloat16).rows
      16
    """
    tile = row_tile(dtype)
    return Config(min(round_up(m, tile), INTERPRETED_ROWS), n, k, 2, 1, True, True, CHIPS["v6e"].vmem_bytes)


def interpreted_weight_config(m: int, k: int, n: int, dtype: Any) -> WeightConfig:
    """For ``interpret=True``: see `interpreted_config`."""
    rows = min(round_up(m, row_tile(dtype)), INTERPRETED_ROWS)
    return WeightConfig(rows, rows, k, n, k, 2, 1, CHIPS["v6e"].vmem_bytes)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What a config is chosen for: see `default_config`. Sizes are of an element, in bytes."""

    m: int
    k: int
    n: int
    groups: int
    size: int
    out_size: int
    transposed: bool
    wide: int

    @property
    def tile(self) -> int:
        return 32 // self.size

    def piece_bytes(self, config: Config) -> int:
        columns, depth = self.wide * config.columns, config.depth
        if self.transposed:
            return round_up(columns, self.tile) * round_up(depth, LANES) * self.size
        return round_up(depth, self.tile) * round_up(columns, LANES) * self.size

    def pieces(self, config: Config) -> int:
        return -(-self.n // config.columns) * (self.k // config.depth)


def _configs(shape: _Shape, budget: int) -> Iterator[Config]:
    k, n = shape.k, shape.n
    # Slices of the minor axis start and end at multiples of 128; of the other one, at row tiles.
    all_columns = axis_parts(n) if shape.transposed or n % LANES == 0 else [n]
    depths = [p for p in axis_parts(k, step=LANES if shape.transposed else shape.tile) if k % p == 0]
    for rows in _chunks(shape.m, shape.groups, shape.tile):
        for columns in all_columns:
            for depth in depths:
                long = sum(heights(rows, shape.tile)) * depth * columns * shape.wide > LONGEST_PROGRAM
                if (depth < k and columns != all_columns[-1]) or (long and columns > 2 * LANES < n):
                    continue
                for resident, buffers in ((True, 1), (False, 3), (False, 2)):
                    one = Config(rows, columns, depth, 1, buffers, True, resident, budget)
                    pieces, few = shape.pieces(one), max(2, -(-IN_FLIGHT_BYTES // shape.piece_bytes(one)))
                    # All weights of two groups; of one, and some of the next; a stream of pieces.
                    for slots, by_group in (
                        (max(2 * pieces, few), True),
                        (pieces + few, True),
                        (few, False),
                        (2, False),
                    ):
                        yield dataclasses.replace(one, slots=slots, by_group=by_group)


def _chunks(m: int, groups: int, tile: int) -> list[int]:
    """Rows a chunk: powers of two, and what holds the rows of most groups if all get about the same."""
    tallest = max(tile, min(512, 1 << (m - 1).bit_length()))
    share = round_up(int(1.1 * m / groups) + tile, 128)
    return [*powers_of_two(tallest, tile), *([share] if 128 < share <= min(m, MOST_ROWS) else [])]


def heights(rows: int, tile: int) -> list[int]:
    """Heights of the products for a chunk of up to `rows` rows, ascending.

    Example:
      >>> heights(128, 16)
      [32, 64, 128]
    """
    powers = [height for height in powers_of_two(1024, 2 * tile) if height < rows]
    return [*powers[::-1], rows]


def axis_parts(size: int, *, step: int = LANES) -> list[int]:
    """Lengths that an axis may be cut into, longest first.

    Its divisors that are multiples of `step`, and some multiples of 128 that leave a shorter last part.
    """
    units = size // step
    divisors = [step * d for d in range(units, 0, -1) if units % d == 0] if size % step == 0 else []
    return sorted({size, *divisors, *(part for part in (1024, 512, 256) if part < size)}, reverse=True)


def _forward_bytes(config: Config, shape: _Shape) -> int:
    columns = round_up(config.columns, LANES) * shape.wide
    rows = shape.m + config.rows if config.resident else config.buffers * config.rows
    kept = rows * (round_up(shape.k, LANES) * shape.size + round_up(shape.n, LANES) * shape.out_size)
    values = (2 if config.depth == shape.k else 3) * config.rows * columns * 4
    split = _split_bytes(shape.size, (config.rows + columns) * config.depth)
    return config.slots * shape.piece_bytes(config) + kept + values + split + COMPILER_BYTES


def _forward_seconds(config: Config, shape: _Shape, chip: Chip) -> float:
    """Roughly how long it takes where all groups have about the same rows."""
    active = min(shape.groups, shape.m)
    span = shape.m // active + shape.tile  # the rows of a group are seldom aligned
    chunks = -(-span // config.rows)
    last = span - (chunks - 1) * config.rows
    rows = (chunks - 1) * config.rows + next(h for h in heights(config.rows, shape.tile) if h >= last)
    narrow = 1 + NARROW_COLUMNS / config.columns
    weights = shape.k * shape.n * shape.wide * shape.size
    a_group = (rows + chunks * chip.push_rows) * weights * narrow / chip.flops
    pieces = shape.pieces(config)
    busy = active * (a_group + chunks * (CHUNK_SECONDS + pieces * PIECE_SECONDS))
    rows_bytes = shape.m * (shape.k * shape.size + shape.n * shape.out_size)
    moved = active * weights * (1 if config.by_group else chunks) + rows_bytes
    if config.resident:
        # Nothing is multiplied before all rows have come, nor after the last weights.
        busy += rows_bytes / chip.bandwidth
    else:
        moved += active * shape.tile * shape.k * shape.size  # row tiles that two groups share are read twice
    program = sum(heights(config.rows, shape.tile)) * config.depth * config.columns * shape.wide
    moving = (moved + program * PROGRAM_BYTES) / chip.bandwidth
    # Groups differ in rows, so what runs ahead must bridge some; and the last piece is multiplied when all has come.
    ahead = config.slots * shape.piece_bytes(config)
    uneven = (
        1.0 + 0.03 * (ahead < 2 * weights) + 0.1 * (ahead < IN_FLIGHT_BYTES) + 0.03 * (config.buffers == 2)
    )
    return _overlapped(moving, busy) * uneven + a_group / pieces


def _overlapped(moving: float, busy: float) -> float:
    """The time of two things at once: the longer, and more the closer the other one comes."""
    return float((moving**4 + busy**4) ** 0.25)


def default_weight_config(
    m: int, k: int, n: int, groups: int, dtype: Any, *, tpu: str = "v6e"
) -> WeightConfig:
    """The config for the weight gradient, ``[m, k]`` and ``[m, n]`` to ``[groups, k, n]``: see `default_config`."""
    chip, size = CHIPS[tpu], jnp.dtype(dtype).itemsize
    budget = int(chip.vmem_bytes * VMEM_SHARE)
    most = round_up(m, 32 // size)
    candidates = [
        WeightConfig(rows, min(rows, height), depth, columns, piece, buffers, stages, budget)
        for height in (256, 512)
        for rows in ([most] if most < height else range(height, min(MOST_WEIGHT_ROWS, most) + 1, height))
        for depth in _divisors(k)
        for columns in _divisors(n)
        for piece in _pieces(depth)
        if sum(range(height, rows + 1, height)) * piece * columns <= LONGEST_PROGRAM or piece <= 2 * LANES
        for buffers in (3, 2)
        for stages in sorted({2, -(-depth // piece)})
    ]
    fitting = [c for c in candidates if _weight_bytes(c, size) <= budget]
    return (
        min(fitting, key=lambda c: _weight_seconds(c, m, k, n, groups, size, chip))
        if fitting
        else min(candidates, key=lambda c: _weight_bytes(c, size))
    )


def _divisors(size: int) -> list[int]:
    return [part for part in axis_parts(size) if size % part == 0 and (part == size or part % LANES == 0)]


def _pieces(depth: int) -> list[int]:
    return [part for part in axis_parts(depth) if part == depth or part % LANES == 0]


def _weight_bytes(config: WeightConfig, size: int) -> int:
    depth, columns = round_up(config.depth, LANES), round_up(config.columns, LANES)
    piece = round_up(config.piece, LANES)
    rows = config.buffers * config.rows * (depth + columns) * size
    staged = config.stages * piece * columns * size
    split = _split_bytes(size, config.rows * (piece + columns))
    # lhs is transposed on its way into the product.
    transposed = config.rows * piece * size
    return rows + depth * columns * 4 + staged + 2 * piece * columns * 4 + transposed + split + COMPILER_BYTES


def _weight_seconds(
    config: WeightConfig, m: int, k: int, n: int, groups: int, size: int, chip: Chip
) -> tuple[float, int]:
    span = int(m / groups) + 32 // size
    chunks = -(-span // config.rows)
    last = span - (chunks - 1) * config.rows
    rows = (chunks - 1) * config.rows + round_up(last, config.height)
    # Each piece loads grad into the matrix unit anew.
    narrow = 1 + 2 * chip.push_rows / config.piece
    multiplying = groups * rows * 2 * k * n * narrow * (size / 2) / chip.flops
    passes = (k // config.depth) * (n // config.columns)
    summing = groups * (chunks - 1) * 4 * k * n / SUMS_BANDWIDTH
    busy = multiplying + summing + groups * passes * chunks * CHUNK_SECONDS
    moving = (
        size * (m * k * (n // config.columns) + m * n * (k // config.depth) + groups * k * n) / chip.bandwidth
    )
    # The result of a group goes out at once, while the rows of the next are on their way.
    uneven = 1.0 + 0.06 * (config.stages * config.piece < config.depth) + 0.03 * (config.buffers == 2)
    return _overlapped(moving, busy) * uneven, _weight_bytes(config, size)


def _split_bytes(size: int, elements: int) -> int:
    """HIGHEST precision splits f32 operands into three bf16 parts."""
    return 3 * 2 * elements if size == 4 else 0
