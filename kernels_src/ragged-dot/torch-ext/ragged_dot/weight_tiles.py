"""How the weight gradient is cut: which configs there are for its shapes, and which is likeliest the fastest.

As `forward_tiles` for the grouped product.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .tiles import (
    CHIPS,
    CHUNK_SECONDS,
    COMPILER_BYTES,
    INTERPRETED_ROWS,
    LANES,
    Chip,
    WeightConfig,
    axis_parts,
    divisible,
    overlapped,
    ranked,
    read_config,
    round_up,
    row_tile,
    split_bytes,
    vmem_budget,
)
from .weight_gradient import gmm_weights

MOST_ROWS = 1536
# The compiler unrolls a product: multiplications in all of a program's products, at most.
LONGEST_PROGRAM = 4.3e9
# Sums of several chunks are loaded and stored at this rate.
SUMS_BANDWIDTH = 6e12


@dataclasses.dataclass(frozen=True)
class WeightProduct:
    """A weight gradient, ``[m, k]`` and ``[m, n]`` to ``[groups, k, n]``: a problem of `tpu_ops.tables`.

    Attributes:
      m, k, n, groups: axes.
      sizes: number of group sizes; `groups` of them have their weights here.
      dtype: of the operands and of the result.
    """

    m: int
    k: int
    n: int
    groups: int
    sizes: int
    dtype: str = "bfloat16"

    operation = "weight_gradient"

    @property
    def dimensions(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("m", "k", "n", "groups", "sizes")}

    @property
    def variant(self) -> dict[str, Any]:
        return {"dtype": self.dtype}

    def candidates(self, tpu: str) -> list[WeightConfig]:
        """The configs that fit into the vector memory of `tpu`, likeliest best first; the smallest if none does."""
        budget = vmem_budget(tpu)
        shares = CHIPS[tpu].cores if divisible(self.n, CHIPS[tpu].cores) else 1
        configs = list(dict.fromkeys(self._configs(budget, shares)))
        fitting = [config for config in configs if self.vmem_bytes(config) <= budget]
        if not fitting:
            return [min(configs, key=self.vmem_bytes)]
        fitting.sort(key=self.vmem_bytes)
        seconds = functools.partial(self._seconds, chip=CHIPS[tpu])
        return ranked(fitting, seconds, lambda c: (c.depth, c.columns, c.piece))

    def fitting(self, values: Mapping[str, Any], tpu: str) -> WeightConfig | None:
        """The config with these values; None if the kernel cannot solve this gradient with it."""
        config = read_config(WeightConfig, values, tpu)
        if config is None:
            return None
        fits = (
            config.height % self._tile == 0
            and config.rows % config.height == 0
            and config.depth in _divisors(self.k)
            and divisible(self.n, config.shares)
            and config.columns in _divisors(self.n // config.shares)
            and (config.piece == config.depth or (config.piece % LANES == 0 and config.piece < config.depth))
            and config.buffers >= 2
            and not self._is_long(config)
            and self.vmem_bytes(config) <= config.vmem_bytes
        )
        return config if fits else None

    def program(self, config: WeightConfig) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
        """The gradient with `config`, and its arguments."""

        def weight_gradient(lhs: Any, grad: Any, group_sizes: Any, group_offset: Any = None) -> jax.Array:
            return gmm_weights(
                lhs,
                grad,
                group_sizes,
                jnp.zeros(1, jnp.int32) if group_offset is None else group_offset,
                groups=self.groups,
                out_dtype=jnp.dtype(self.dtype),
                config=config,
                interpret=False,
            )

        rows = round_up(self.m, self._tile)
        arguments = {
            "lhs": jax.ShapeDtypeStruct((rows, self.k), self.dtype),
            "grad": jax.ShapeDtypeStruct((rows, self.n), self.dtype),
            "group_sizes": jax.ShapeDtypeStruct((self.sizes,), "int32"),
        }
        if self.sizes > self.groups:
            arguments["group_offset"] = jax.ShapeDtypeStruct((1,), "int32")
        return weight_gradient, arguments

    def vmem_bytes(self, config: WeightConfig) -> int:
        """Vector memory that the kernel takes, roughly."""
        depth, columns = round_up(config.depth, LANES), round_up(config.columns, LANES)
        piece = round_up(config.piece, LANES)
        rows = config.buffers * config.rows * (depth + columns) * self._size
        staged = config.stages * piece * columns * self._size
        split = split_bytes(self._size, config.rows * (piece + columns))
        # lhs is transposed on its way into the product.
        transposed = config.rows * piece * self._size
        return (
            rows
            + depth * columns * 4
            + staged
            + 2 * piece * columns * 4
            + transposed
            + split
            + COMPILER_BYTES
        )

    @property
    def _tile(self) -> int:
        return row_tile(self.dtype)

    @property
    def _size(self) -> int:
        return int(jnp.dtype(self.dtype).itemsize)

    def _is_long(self, config: WeightConfig) -> bool:
        multiplied = sum(range(config.height, config.rows + 1, config.height)) * config.piece * config.columns
        return multiplied > LONGEST_PROGRAM and config.piece > 2 * LANES

    def _configs(self, budget: int, shares: int) -> Iterator[WeightConfig]:
        most = round_up(self.m, self._tile)
        for height in (256, 512):
            tall = range(height, min(MOST_ROWS, most) + 1, height)
            for rows in [most] if most < height else tall:
                for depth in _divisors(self.k):
                    for columns in _divisors(self.n // shares):
                        for piece in _pieces(depth):
                            for buffers in (3, 2):
                                for stages in sorted({2, -(-depth // piece)}):
                                    config = WeightConfig(
                                        rows,
                                        min(rows, height),
                                        depth,
                                        columns,
                                        piece,
                                        buffers,
                                        stages,
                                        budget,
                                        shares,
                                    )
                                    if not self._is_long(config):
                                        yield config

    def _seconds(self, config: WeightConfig, chip: Chip) -> float:
        """Roughly how long a core takes where all groups have about the same rows."""
        groups, k, n, size = self.groups, self.k, self.n // config.shares, self._size
        m = -(-self.m * groups // self.sizes)
        span = m // groups + self._tile
        chunks = -(-span // config.rows)
        last = span - (chunks - 1) * config.rows
        rows = (chunks - 1) * config.rows + round_up(last, config.height)
        # Each piece loads grad into the matrix unit anew.
        narrow = 1 + 2 * chip.push_rows / config.piece
        multiplying = groups * rows * 2 * k * n * narrow * (size / 2) / chip.flops
        passes = (k // config.depth) * (n // config.columns)
        summing = groups * (chunks - 1) * 4 * k * n / SUMS_BANDWIDTH
        busy = multiplying + summing + groups * passes * chunks * CHUNK_SECONDS
        if config.stages == 1:
            # Nothing is put in its place before a result is out.
            busy += groups * k * n * size / chip.bandwidth
        rows_moved = m * k * (n // config.columns) + m * n * (k // config.depth)
        moving = size * (rows_moved + groups * k * n) / chip.bandwidth
        # The result of a group goes out at once, while the rows of the next are on their way.
        uneven = 1.0 + 0.06 * (config.stages * config.piece < config.depth) + 0.03 * (config.buffers == 2)
        return overlapped(moving, busy) * uneven


def interpreted_weight_config(m: int, k: int, n: int, dtype: Any) -> WeightConfig:
    """For ``interpret=True``: see `interpreted_config`."""
    rows = min(round_up(m, row_tile(dtype)), INTERPRETED_ROWS)
    return WeightConfig(rows, rows, k, n, k, 2, 1, CHIPS["v6e"].vmem_bytes)


def _divisors(size: int) -> list[int]:
    return [part for part in axis_parts(size) if size % part == 0 and (part == size or part % LANES == 0)]


def _pieces(depth: int) -> list[int]:
    return [part for part in axis_parts(depth) if part == depth or part % LANES == 0]
