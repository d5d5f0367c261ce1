"""How a grouped product is cut: which configs there are for its shapes, and which is likeliest the fastest.

The order comes from a small model of the chip: what moves through HBM, what the matrix unit takes, and what fits into
vector memory. It only ranks; times come from `tpu-kernels simulate` and `tune`, or from a TPU.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .epilogue import Epilogue
from .forward import PLAIN, gmm
from .quantised import PER_WORD
from .tiles import (
    CHIPS,
    CHUNK_SECONDS,
    COMPILER_BYTES,
    INTERPRETED_ROWS,
    LANES,
    MIB,
    SUBLANES,
    Chip,
    Config,
    axis_parts,
    divisible,
    heights,
    overlapped,
    powers_of_two,
    ranked,
    read_config,
    round_up,
    row_tile,
    split_bytes,
    vmem_budget,
)

# What the compiler's schedules show (simulated, v6e): a narrow piece of weights takes the rows from vector memory
# again, as long as multiplying this many columns; and a piece in a chunk costs this much beside its products.
NARROW_COLUMNS = 64
PIECE_SECONDS = 0.05e-6
# Weights that are on their way at any time, at least: what HBM moves within its latency.
IN_FLIGHT_BYTES = 4 * MIB
PROGRAM_BYTES = 4e-4  # about 5 bundles of 64 bytes for a million multiplications
MOST_ROWS = 1280
# The compiler unrolls a product: multiplications in all of a program's products, at most.
LONGEST_PROGRAM = 5.4e9
UNEVEN = (0.5, 0.9, 1.0, 1.1, 1.5)  # rows of groups, as shares of the mean
LONG_COLUMNS = 1536  # at least so many are in a share of a result


@dataclasses.dataclass(frozen=True)
class Product:
    """A grouped product, ``[m, k] x [groups, k, n]``, as `forward.gmm` has it: a problem of `tpu_ops.tables`.

    Attributes:
      m, k, n, groups: axes.
      sizes: number of group sizes; `groups` of them have their weights here.
      dtype: of both operands; of the rows where weights are quantised.
      out_dtype: of the result.
      transposed: the weights are stored as [groups, n, k].
      wide: columns of weights for each column of the result: 2 with a gate.
      weights: dtype of quantised weights, "int8" or of MXFP4's words "int32"; else empty.
      scales: numbers that scale a column of quantised weights.

    Example:
      >>> Product(8, 2048, 1536, 128, 128).candidates("v6e")[0].resident
      True
    """

    m: int
    k: int
    n: int
    groups: int
    sizes: int
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    transposed: bool = True
    wide: int = 1
    weights: str = ""
    scales: int = 0

    operation = "forward"

    @property
    def dimensions(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("m", "k", "n", "groups", "sizes")}

    @property
    def variant(self) -> dict[str, Any]:
        names = ("dtype", "out_dtype", "transposed", "wide")
        quantised = ("weights", "scales") if self.weights else ()
        return {name: getattr(self, name) for name in (*names, *quantised)}

    def candidates(self, tpu: str) -> list[Config]:
        """The configs that fit into the vector memory of `tpu`, likeliest best first.

        Where none fits, the smallest: the compiler's message tells by how much it fails.
        """
        budget = vmem_budget(tpu)
        configs = list(dict.fromkeys(self._configs(budget, CHIPS[tpu].cores)))
        taken = functools.partial(self.vmem_bytes, chip=CHIPS[tpu])
        fitting = [config for config in configs if taken(config) <= budget]
        if not fitting:
            return [min(configs, key=taken)]
        seconds = functools.partial(self._seconds, chip=CHIPS[tpu])
        return ranked(fitting, seconds, lambda c: (c.columns, c.depth, c.by_group, c.resident))

    def fitting(self, values: Mapping[str, Any], tpu: str) -> Config | None:
        """The config with these values; None if the kernel cannot solve this product with it."""
        config = read_config(Config, values, tpu)
        if config is None:
            return None
        of_share = self.n // config.shares
        columns = min(config.columns, of_share)
        config = dataclasses.replace(config, columns=columns)
        aligned_columns = columns == of_share or (columns % LANES == 0 and self._cuts_columns)
        fits = (
            config.rows % self._tile == 0
            and aligned_columns
            and divisible(self.n, config.shares)
            and self.k % config.depth == 0
            and (config.depth == self.k or (config.depth % self._depth_step == 0 and self._cuts_depth))
            and config.slots >= (max(2, self.pieces(config)) if config.by_group else 2)
            and (config.buffers == 1 if config.resident else config.buffers >= 2)
            and not self._is_long(config)
            and self.vmem_bytes(config, CHIPS[tpu]) <= config.vmem_bytes
        )
        return config if fits else None

    def program(self, config: Config) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
        """The product with `config`, and its arguments; with a gate where `wide` is 2."""
        epilogue = Epilogue("silu", "concatenated") if self.wide == 2 else PLAIN

        def forward(
            lhs: Any, rhs: Any, group_sizes: Any, group_offset: Any = None, rhs_scale: Any = None
        ) -> jax.Array:
            return gmm(
                lhs,
                rhs,
                group_sizes,
                jnp.zeros(1, jnp.int32) if group_offset is None else group_offset,
                scale=rhs_scale,
                transpose_rhs=self.transposed,
                out_dtype=jnp.dtype(self.out_dtype),
                config=config,
                epilogue=epilogue,
            )

        rows = round_up(self.m, SUBLANES if config.resident else self._tile)
        n = self.n * self.wide
        depth = self.k // PER_WORD if self._mxfp4 else self.k
        weights = (n, depth) if self.transposed else (depth, n)
        arguments = {
            "lhs": jax.ShapeDtypeStruct((rows, self.k), self.dtype),
            "rhs": jax.ShapeDtypeStruct((self.groups, *weights), self.weights or self.dtype),
            "group_sizes": jax.ShapeDtypeStruct((self.sizes,), "int32"),
        }
        if self.sizes > self.groups:
            arguments["group_offset"] = jax.ShapeDtypeStruct((1,), "int32")
        if self.weights:
            kind = "uint8" if self._mxfp4 else "float32"
            arguments["rhs_scale"] = jax.ShapeDtypeStruct((self.groups, self.scales, n), kind)
        return forward, arguments

    def pieces(self, config: Config) -> int:
        """Pieces that the weights of a group are cut into, for a share of the columns."""
        return -(-(self.n // config.shares) // config.columns) * (self.k // config.depth)

    def vmem_bytes(self, config: Config, chip: Chip) -> int:
        """Vector memory that the kernel takes, roughly."""
        columns = round_up(config.columns, LANES) * self.wide
        rows = self.m + config.rows if config.resident else config.buffers * config.rows
        wide = round_up(self.n // config.shares, LANES)
        kept = rows * (round_up(self.k, LANES) * self._size + wide * self._out_size)
        values = (2 if config.depth == self.k else 3) * config.rows * columns * 4
        split = split_bytes(self._size, (config.rows + columns) * config.depth)
        # For narrow matrix units the compiler keeps the rows of a product once more.
        again = config.rows * config.depth * self._size if chip.matrix_columns <= LANES else 0
        # Quantised weights are made floats of: int8 by way of 32 bits where a TPU knows no other, MXFP4 from exponents
        # in 32 bits.
        words = self.scales if self._mxfp4 else config.depth
        floats = (config.depth * self._size + 4 * words) * columns if self.weights else 0
        return (
            config.slots * self._piece_bytes(config) + kept + again + values + split + floats + COMPILER_BYTES
        )

    @property
    def _tile(self) -> int:
        return row_tile(self.dtype)

    @property
    def _size(self) -> int:
        return int(jnp.dtype(self.dtype).itemsize)

    @property
    def _mxfp4(self) -> bool:
        return self.weights == "int32"

    @property
    def _out_size(self) -> int:
        return int(jnp.dtype(self.out_dtype).itemsize)

    @property
    def _cuts_columns(self) -> bool:
        # Slices of the minor axis start and end at multiples of 128; of the other one, at row tiles.
        return self.transposed or self.n % LANES == 0

    @property
    def _cuts_depth(self) -> bool:
        # What scales parts of K stays together with them.
        return not self.weights or (not self._mxfp4 and self.scales == 1)

    @property
    def _depth_step(self) -> int:
        return LANES if self.transposed else 32 if self.weights else self._tile

    def _piece_bytes(self, config: Config) -> int:
        columns, depth = self.wide * config.columns, config.depth
        if self._mxfp4:
            return (depth // PER_WORD * 4 + round_up(self.scales, 32)) * round_up(columns, LANES)
        size, tile = (1, 32) if self.weights else (self._size, self._tile)
        scales = 4 * round_up(self.scales, SUBLANES) * round_up(columns, LANES)
        if self.transposed:
            return round_up(columns, tile) * round_up(depth, LANES) * size + scales
        return round_up(depth, tile) * round_up(columns, LANES) * size + scales

    @property
    def _weight_bytes(self) -> float:
        """Of a group's weights in HBM."""
        columns = self.n * self.wide
        if self._mxfp4:
            return columns * (self.k / 2 + self.scales)
        return columns * (self.k * (1 if self.weights else self._size) + 4 * self.scales)

    def _program_size(self, config: Config) -> int:
        """Multiplications in all of the program's products."""
        return sum(heights(config.rows, self._tile)) * config.depth * config.columns * self.wide

    def _is_long(self, config: Config) -> bool:
        return (
            self._program_size(config) > LONGEST_PROGRAM
            and config.columns > 2 * LANES < self.n // config.shares
        )

    def _configs(self, budget: int, cores: int) -> Iterator[Config]:
        # On few rows the weights are the work; with many, they are read again and again where VMEM holds rows of long
        # results, unless these are made in shares.
        most = self.n // LONG_COLUMNS if self.m > MOST_ROWS else cores
        for shares in (1, 2, 4, 8):
            if cores <= shares <= max(cores, most) and divisible(self.n, shares):
                yield from self._configs_of_share(budget, shares)
        if not divisible(self.n, cores):
            yield from self._configs_of_share(budget, 1)

    def _configs_of_share(self, budget: int, shares: int) -> Iterator[Config]:
        k, n = self.k, self.n // shares
        all_columns = axis_parts(n) if self._cuts_columns else [n]
        depths = [p for p in axis_parts(k, step=self._depth_step) if k % p == 0]
        for rows in self._chunks():
            for columns in all_columns:
                for depth in depths:
                    if depth < k and (columns != all_columns[-1] or not self._cuts_depth):
                        continue
                    for resident, buffers in ((True, 1), (False, 3), (False, 2)):
                        one = Config(rows, columns, depth, 1, buffers, True, resident, budget, shares)
                        if self._is_long(one):
                            continue
                        pieces = self.pieces(one)
                        few = max(2, -(-IN_FLIGHT_BYTES // self._piece_bytes(one)))
                        # All weights of two groups; of one, and some of the next; a stream of pieces.
                        whole = [(max(2 * pieces, few), True), (pieces + few, True)]
                        for slots, by_group in (*whole, (few, False), (2, False)):
                            yield dataclasses.replace(one, slots=slots, by_group=by_group)

    @property
    def _rows_here(self) -> int:
        """Rows of the groups whose weights are here, if all groups have about the same."""
        return -(-self.m * self.groups // self.sizes)

    def _chunks(self) -> list[int]:
        """Rows a chunk: powers of two, and what holds the rows of most groups if all get about the same."""
        most = 1024 if self.m >= 1024 * self.sizes else 512
        tallest = max(self._tile, min(most, 1 << (self.m - 1).bit_length()))
        share = round_up(int(1.1 * self.m / self.sizes) + self._tile, 128)
        more = [share] if 128 < share <= min(self.m, MOST_ROWS) else []
        return [*powers_of_two(tallest, self._tile), *more]

    def _chunks_of_groups(self, share: float, rows: int) -> tuple[float, float]:
        """Chunks of `rows`, and rows multiplied, for a group of about `share` rows: in the mean, as groups differ."""
        chunks = multiplied = 0
        for uneven in UNEVEN:
            span = int(uneven * share) + self._tile  # the rows of a group are seldom aligned
            before = (span - 1) // rows
            last = span - before * rows
            chunks += before + 1
            multiplied += before * rows + next(h for h in heights(rows, self._tile) if h >= last)
        return chunks / len(UNEVEN), multiplied / len(UNEVEN)

    def _seconds(self, config: Config, chip: Chip) -> float:
        """Roughly how long it takes where groups have about the same rows."""
        n = self.n // config.shares
        whole, rest = divmod(n, config.columns)
        multiplied = whole * round_up(config.columns, chip.matrix_columns) + round_up(
            rest, chip.matrix_columns
        )
        active = min(self.groups, self._rows_here)
        chunks, rows = self._chunks_of_groups(self._rows_here / active, config.rows)
        narrow = 1 + NARROW_COLUMNS / config.columns
        floats = self.k * multiplied * self.wide * self._size
        a_group = (rows + chunks * chip.push_rows) * floats * narrow / chip.flops
        weights = self._weight_bytes / config.shares
        pieces = self.pieces(config)
        a_group += chunks * (CHUNK_SECONDS + pieces * PIECE_SECONDS)
        if not config.resident:
            # Copies come one after the other: rows wait for the piece before them, longer than the chunks in hand last.
            in_hand = (config.buffers - 1) * a_group / chunks
            a_group += pieces * max(0.0, self._piece_bytes(config) / chip.bandwidth - in_hand)
        busy = active * a_group
        rows_bytes = self._rows_here * self.k * self._size + self.m * n * self._out_size
        moved = active * weights * (1 if config.by_group else chunks) + rows_bytes
        if config.resident:
            # Nothing is multiplied before all rows have come, nor after the last weights.
            busy += rows_bytes / chip.bandwidth
        else:
            moved += (
                active * self._tile * self.k * self._size
            )  # row tiles that two groups share are read twice
        moving = (moved + self._program_size(config) * PROGRAM_BYTES) / chip.bandwidth
        # Groups differ in rows, so what runs ahead must bridge some; two slots stall (simulated, TPU7x: by 15 to 30 %);
        # and the last piece is multiplied when all has come.
        ahead = config.slots * self._piece_bytes(config)
        uneven = 1.0 + 0.03 * (ahead < 2 * weights) + 0.1 * (ahead < IN_FLIGHT_BYTES)
        uneven += 0.03 * (config.buffers == 2) + 0.1 * (config.slots == 2)
        of_share = overlapped(moving, busy) * uneven + a_group / pieces
        return of_share * -(-config.shares // chip.cores)


def interpreted_config(m: int, k: int, n: int, dtype: Any) -> Config:
    """For ``interpret=True``: the shortest program, as every line of it is compiled for the CPU.

    Example:
      >>> interpreted_config(8, 64, 128, jnp.bfloat16).rows
      16
    """
    tile = row_tile(dtype)
    return Config(min(round_up(m, tile), INTERPRETED_ROWS), n, k, 2, 1, True, True, CHIPS["v6e"].vmem_bytes)
