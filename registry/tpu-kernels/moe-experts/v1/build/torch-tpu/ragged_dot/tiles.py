"""What the cut of a product is made from: a TPU's sizes and speeds, and how axes may be divided."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp

MIB = 1024 * 1024
LANES = 128
SUBLANES = 8


@dataclasses.dataclass(frozen=True)
class Chip:
    """What the choice of a config knows about one core of a TPU generation.

    Attributes:
      vmem_bytes: vector memory.
      flops: bf16 operations a second.
      bandwidth: HBM bytes a second that a kernel attains; of one that all cores work on, a core's share.
      push_rows: loading a tile of weights into the matrix unit takes as long as multiplying this many rows.
      matrix_columns: columns of weights that the matrix unit takes at once; fewer take as long.
      cores: cores of the chip that a kernel can be divided between.
    """

    vmem_bytes: int
    flops: float
    bandwidth: float
    push_rows: int
    matrix_columns: int
    cores: int = 1


CHIPS = {
    "v4": Chip(16 * MIB, 138e12, 1.0e12, 16, 128),
    "v5e": Chip(128 * MIB, 197e12, 0.71e12, 16, 128),
    "v5p": Chip(64 * MIB, 230e12, 1.19e12, 16, 128, cores=2),
    "v6e": Chip(128 * MIB, 918e12, 1.43e12, 64, 256),
    "tpu7x": Chip(64 * MIB, 1150e12, 3.17e12, 64, 256),
}
# The share of vector memory that a kernel may ask for: the compiler keeps some for itself, and XLA may have staged
# an operand of a neighbouring op.
VMEM_SHARE = 0.9
COMPILER_BYTES = 2 * MIB
# What the compiler's schedules show: a chunk costs this much beside its products.
CHUNK_SECONDS = 0.15e-6
INTERPRETED_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """How `forward.gmm` cuts a product.

    Attributes:
      rows: rows of a chunk, a multiple of the row tile.
      columns: columns of a piece of weights; a multiple of 128, or all of a share of N.
      depth: part of K in a piece; K, or where that does not fit a divisor of it that is a multiple of 128.
      slots: pieces of weights that vector memory holds.
      buffers: chunks of lhs that it holds; of the result, it holds two.
      by_group: the chunks of a group share its weights, all of which the slots must hold; else every chunk fetches
        them.
      resident: vector memory holds all of lhs and of the result.
      vmem_bytes: vector memory that the kernel may use.
      shares: that N is made in, one after the other or each on a core of its own; all rows are read for each, and
        the columns above are of one.
    """

    rows: int
    columns: int
    depth: int
    slots: int
    buffers: int
    by_group: bool
    resident: bool
    vmem_bytes: int
    shares: int = 1


@dataclasses.dataclass(frozen=True)
class WeightConfig:
    """How `weight_gradient.gmm_weights` cuts a product.

    Attributes:
      rows: rows of a chunk, a multiple of `height`.
      height: rows are multiplied in multiples of this.
      depth, columns: of K and of a share of N in one pass over the rows; divisors of them, multiples of 128 where
        they are not all of it.
      piece: of `depth` in one product; it, or a multiple of 128.
      buffers: chunks of lhs, and of grad, that vector memory holds.
      stages: pieces of the result on their way out.
      vmem_bytes: vector memory that the kernel may use.
      shares: that N is made in, as in `Config`.
    """

    rows: int
    height: int
    depth: int
    columns: int
    piece: int
    buffers: int
    stages: int
    vmem_bytes: int
    shares: int = 1


C = TypeVar("C", Config, WeightConfig)


def read_config(kind: type[C], values: Mapping[str, Any], tpu: str) -> C | None:
    """The config with these values and a generation's vector memory; None where they are not those of a config."""
    types = {field.name: bool if field.type == "bool" else int for field in dataclasses.fields(kind)}
    if values.keys() != types.keys() or any(type(values[name]) is not types[name] for name in types):
        return None
    if any(value < 1 for value in values.values() if type(value) is int):
        return None
    return kind(**{**values, "vmem_bytes": vmem_budget(tpu)})


def vmem_budget(tpu: str) -> int:
    """The vector memory that a kernel may use, in bytes."""
    return int(CHIPS[tpu].vmem_bytes * VMEM_SHARE)


def divisible(columns: int, shares: int) -> bool:
    """Whether the columns of a result can be made in so many shares: of whole lanes, if there are several.

    Example:
      >>> divisible(1536, 2), divisible(128, 2), divisible(100, 1)
      (True, False, True)
    """
    return shares == 1 or columns % (shares * LANES) == 0


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


def overlapped(moving: float, busy: float) -> float:
    """The time of two things at once: the longer, and more the closer the other one comes."""
    return float((moving**4 + busy**4) ** 0.25)


def split_bytes(size: int, elements: int) -> int:
    """HIGHEST precision splits f32 operands into three bf16 parts."""
    return 3 * 2 * elements if size == 4 else 0


def ranked(configs: Iterable[C], seconds: Callable[[C], float], alike: Callable[[C], Any]) -> list[C]:
    """`configs` by their estimated `seconds`, least first.

    Estimates of a few percent more or less say nothing: so one that is `alike` others before it waits for configs
    that are 1 % worse for each of these, and the first few differ in what matters.
    """
    times: dict[Any, int] = collections.defaultdict(int)
    scored = []
    for config in sorted(configs, key=seconds):
        estimate = seconds(config)
        scored.append((estimate * (1 + 0.01 * times[alike(config)]), config))
        times[alike(config)] += 1
    return [config for _, config in sorted(scored, key=lambda each: each[0])]
