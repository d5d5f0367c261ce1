"""Grouped matmul on TPUs in Pallas: rows sorted by group, one weight matrix a group.

Axis letters::

    M  rows of lhs and of the result     S  number of group sizes
    K  contraction                       G  groups whose weights are here (G <= S)
    N  columns of the result             W  work items

A *work item* is one row tile seen by one group. The kernel lists the items itself, in scalar code from the
group sizes, so that no XLA op runs before it, then walks the list in a software pipeline::

    sizes [S] ─ scalar loop ─> items: (group, row tile, first row, last row)      in SMEM
    for each column tile n:
        for each item w:                               DMA of item w+1 overlaps the product of item w
            fetch lhs[tile(w)], rhs[group(w), n]       (skipped where the block is the one already there)
            out[tile(w), n] = rows of group(w) from the product, other rows as they were

(K is one tile; where it does not fit, each item takes several steps and sums them up.)

Only groups that have rows are listed, so only their weights are read, once per column tile for all row tiles
in a row. Row tiles that no group touches get an item without rows, which writes zeros. Weights are taken in
either stored layout, `[G, K, N]` or `[G, N, K]`: the block is read as stored and the product contracts the
axis that K is on.

The weight gradient (`_gmm_weights`) walks the same kind of list with one accumulator a group; a group
without rows gets an item too, which writes zeros.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

MIB = 1024 * 1024
LANES = 128

# Vector memory of one core, in bytes, and the share of it that a kernel may ask for: the compiler keeps some
# for itself, and XLA may have staged an operand of a neighbouring op.
VMEM_BYTES = {"v4": 16 * MIB, "v5e": 128 * MIB, "v5p": 64 * MIB, "v6e": 128 * MIB, "tpu7x": 64 * MIB}
VMEM_SHARE = 0.75
COMPILER_BYTES = MIB


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes of one grouped matmul.

    Attributes:
      tile_m: rows a tile; a multiple of the sublane packing (8 rows of f32, 16 of bf16).
      tile_n: columns a tile; a multiple of 128, or N.
      tile_k: a multiple of 128, or K. The forward product wants all of K in one tile, and splits it (into equal
        tiles) only where that does not fit.
      vmem_bytes: vector memory the kernel may use.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    vmem_bytes: int


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def _tiles(size: int) -> list[int]:
    """Tile sizes for a minor axis of length `size`, widest first.

    The whole axis; its divisors that are multiples of 128; where it is no multiple of 128, some 128-multiples
    whose last tile overhangs.
    """
    if size % LANES:
        return [size, *(t for t in (2048, 1536, 1024, 512, 256, 128) if t < size)]
    units = size // LANES
    return [LANES * d for d in range(units, 0, -1) if units % d == 0]


def default_config(
    m: int, k: int, n: int, groups: int, dtype: Any, *, tpu: str = "v6e", weight_gradient: bool = False
) -> Config:
    """Tile sizes that fit the vector memory of `tpu`, from the shapes alone.

    Row tiles are about twice as tall as a group with its share of the rows: each group computes all rows of the
    tiles it is in. Then the widest column tile that fits, with two buffers of every block, is taken: weights are
    read in long contiguous pieces, and lhs the fewest times.

    Args:
      m, k, n, groups: axes of the product ``[m, k] x [groups, k, n]``.
      dtype: of both operands.
      tpu: generation: v4, v5e, v5p, v6e or tpu7x.
      weight_gradient: for the product ``[k, m] x [m, n]`` a group.

    Example:
      >>> default_config(512, 2048, 1536, 128, jnp.bfloat16, tpu="v6e").tile_m
      32
    """
    size = jnp.dtype(dtype).itemsize
    budget = int(VMEM_BYTES[tpu] * VMEM_SHARE)
    footprint = _weight_gradient_bytes if weight_gradient else _forward_bytes
    configs = [
        Config(tile_m, tile_n, tile_k, budget)
        for tile_m in _row_tiles(m, groups, size)
        for tile_n in _tiles(n)
        for tile_k in (_tiles(k) if weight_gradient else [k])
    ]
    if not weight_gradient and k % LANES == 0:
        smallest = configs[-1]
        configs += [dataclasses.replace(smallest, tile_k=tile_k) for tile_k in _tiles(k)]
    fitting = (c for c in configs if footprint(c, size) <= budget)
    # Where nothing fits, the smallest is tried all the same: the compiler's message tells by how much it fails.
    return next(fitting, configs[-1])


def interpreted_config(m: int, k: int, n: int, dtype: Any) -> Config:
    """Tiles for ``interpret=True``, which copies whole blocks only: none may overhang.

    Example:
      >>> interpreted_config(64, 2880, 2880, jnp.float32).tile_n
      2880
    """
    return Config(_row_tiles(m, 1, jnp.dtype(dtype).itemsize)[0], n, k, VMEM_BYTES["v6e"])


def _row_tiles(m: int, groups: int, size: int) -> list[int]:
    """Row tiles to try, the wanted one first: powers of two, or all rows where they are fewer."""
    sublanes = 32 // size
    share = 1 << (2 * pl.cdiv(m, groups) - 1).bit_length()
    tallest = min(round_up(m, sublanes), max(share, 32), 512)
    return sorted({min(tallest, t) for t in (sublanes, 2 * sublanes, 64, 128, 256, 512)}, reverse=True)


def _forward_bytes(config: Config, size: int) -> int:
    rows, k, n = config.tile_m, round_up(config.tile_k, LANES), round_up(config.tile_n, LANES)
    blocks = 2 * (size * (rows * k + k * n) + 4 * rows * n)
    # Beside the blocks: lhs in the product's layout, and in f32 the product, as masked, and the sums.
    return blocks + size * rows * k + 3 * 4 * rows * n + _split_bytes(size, (rows + n) * k) + COMPILER_BYTES


def _weight_gradient_bytes(config: Config, size: int) -> int:
    rows, k, n = config.tile_m, round_up(config.tile_k, LANES), round_up(config.tile_n, LANES)
    blocks = 2 * size * (rows * k + rows * n + k * n)
    # Beside the blocks: both sides masked, the sums and the product in f32.
    masked = size * rows * (k + n)
    return blocks + masked + 2 * 4 * k * n + _split_bytes(size, rows * (k + n)) + COMPILER_BYTES


def _split_bytes(size: int, elements: int) -> int:
    """HIGHEST precision splits f32 operands into three bf16 parts."""
    return 3 * 2 * elements if size == 4 else 0


def _list_items(
    sizes: Any, offset: Any, item: dict[str, Any], *, rows: int, tile_m: int, groups: int, every_group: bool
) -> jax.Array:
    """Writes the work items into SMEM; returns their number.

    Args:
      sizes: SMEM ref [S], int32.
      offset: first group whose weights are here.
      item: SMEM refs [W] by name: `group`, `tile`, and the rows `[low, high)` of the group within the tile.
      rows: M.
      every_group: list groups without rows too (weight gradient); else list row tiles without rows.
    """

    def add(at: Any, group: Any, tile: Any, low: Any, high: Any) -> Any:
        item["group"][at] = group
        item["tile"][at] = tile
        item["low"][at] = low
        item["high"][at] = high
        return at + 1

    def add_empty_tiles(first: Any, end: Any, at: Any, group: Any) -> Any:
        if every_group:
            return at
        # The group of the neighbouring item: its weights are in the buffer already, nothing is fetched.
        return jax.lax.fori_loop(first, end, lambda tile, a: add(a, group, tile, 0, 0), at)

    def visit(index: Any, carry: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
        start, at, next_tile, last_group = carry
        # Sizes are data: whatever they hold, no index may leave the arrays.
        end = jnp.minimum(start + jnp.maximum(sizes[index], 0), rows)
        group = index - offset
        here = (group >= 0) & (group < groups)
        listed = here & (end > start)
        first = jnp.where(listed, start // tile_m, next_tile)
        stop = jnp.where(listed, (end + tile_m - 1) // tile_m, first)
        at = add_empty_tiles(next_tile, first, at, jnp.where(listed, group, last_group))

        def tile_of_group(tile: Any, a: Any) -> Any:
            low = jnp.maximum(start - tile * tile_m, 0)
            high = jnp.minimum(end - tile * tile_m, tile_m)
            return add(a, group, tile, low, high)

        at = jax.lax.fori_loop(first, stop, tile_of_group, at)
        if every_group:
            at = jax.lax.fori_loop(
                0,
                jnp.where(here & ~listed, 1, 0),
                lambda _, a: add(a, group, jnp.maximum(next_tile - 1, 0), 0, 0),
                at,
            )
        next_tile = jnp.where(listed, stop, next_tile)
        return end, at, next_tile, jnp.where(listed, group, last_group)

    zero = jnp.int32(0)
    _, at, next_tile, last_group = jax.lax.fori_loop(0, sizes.shape[0], visit, (zero, zero, zero, zero))
    return add_empty_tiles(next_tile, pl.cdiv(rows, tile_m), at, last_group)


def _product(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """`a` times `b` over one axis of each, accumulated in f32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _rows_between(low: Any, high: Any, shape: tuple[int, int]) -> jax.Array:
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return (row >= low) & (row < high)


def _gmm_kernel(
    sizes: Any,
    offset: Any,
    lhs: Any,
    rhs: Any,
    out: Any,
    sums: Any,
    *item_refs: Any,
    config: Config,
    transpose_rhs: bool,
) -> None:
    item = dict(zip(("group", "tile", "low", "high"), item_refs, strict=True))
    m, k = lhs.shape
    n = out.shape[1]
    tile_m, tile_n, tile_k = config.tile_m, config.tile_n, config.tile_k
    parts = k // tile_k
    items = _list_items(sizes, offset[0], item, rows=m, tile_m=tile_m, groups=rhs.shape[0], every_group=False)

    def step(lhs_tile: Any, rhs_tile: Any, out_tile: Any) -> None:
        w, part = pl.program_id(1), pl.program_id(2)
        low, high, tile = item["low"][w], item["high"][w], item["tile"][w]
        opens_tile = (w == 0) | (item["tile"][jnp.maximum(w - 1, 0)] != tile)

        @pl.when(opens_tile & (part == 0))
        def _() -> None:
            out_tile[...] = jnp.zeros_like(out_tile)

        @pl.when(high > low)
        def _() -> None:
            product = _product(lhs_tile[...], rhs_tile[...], (1, 1 if transpose_rhs else 0))
            if parts > 1:
                product += jnp.where(part == 0, jnp.zeros_like(product), sums[...])
                sums[...] = product

            @pl.when(part == parts - 1)
            def _() -> None:
                keep = _rows_between(low, high, product.shape)
                out_tile[...] = jnp.where(keep, product.astype(out_tile.dtype), out_tile[...])

    rhs_block = (None, tile_n, tile_k) if transpose_rhs else (None, tile_k, tile_n)

    def rhs_index(column: Any, w: Any, part: Any) -> tuple[Any, Any, Any]:
        return (item["group"][w], column, part) if transpose_rhs else (item["group"][w], part, column)

    pltpu.emit_pipeline(
        step,
        grid=(pl.cdiv(n, tile_n), items, parts),
        in_specs=[
            pl.BlockSpec((tile_m, tile_k), lambda column, w, part: (item["tile"][w], part)),
            pl.BlockSpec(rhs_block, rhs_index),
        ],
        out_specs=[pl.BlockSpec((tile_m, tile_n), lambda column, w, part: (item["tile"][w], column))],
    )(lhs, rhs, out)


def _gmm_weights_kernel(
    sizes: Any, offset: Any, lhs: Any, grad: Any, out: Any, sums: Any, *item_refs: Any, config: Config
) -> None:
    item = dict(zip(("group", "tile", "low", "high"), item_refs, strict=True))
    m, k = lhs.shape
    n = grad.shape[1]
    items = _list_items(
        sizes, offset[0], item, rows=m, tile_m=config.tile_m, groups=out.shape[0], every_group=True
    )

    def step(lhs_tile: Any, grad_tile: Any, out_tile: Any) -> None:
        w = pl.program_id(2)
        low, high, group = item["low"][w], item["high"][w], item["group"][w]

        @pl.when((w == 0) | (item["group"][jnp.maximum(w - 1, 0)] != group))
        def _() -> None:
            sums[...] = jnp.zeros_like(sums)

        @pl.when(high > low)
        def _() -> None:
            # Both sides are masked: a foreign row may hold NaN, and NaN times zero is NaN.
            a, b = lhs_tile[...], grad_tile[...]
            a = jnp.where(_rows_between(low, high, a.shape), a, jnp.zeros_like(a))
            b = jnp.where(_rows_between(low, high, b.shape), b, jnp.zeros_like(b))
            sums[...] += _product(a, b, (0, 0))

        @pl.when((w == items - 1) | (item["group"][jnp.minimum(w + 1, items - 1)] != group))
        def _() -> None:
            out_tile[...] = sums[...].astype(out_tile.dtype)

    tile_m, tile_k, tile_n = config.tile_m, config.tile_k, config.tile_n
    pltpu.emit_pipeline(
        step,
        grid=(pl.cdiv(k, tile_k), pl.cdiv(n, tile_n), items),
        in_specs=[
            pl.BlockSpec((tile_m, tile_k), lambda i, j, w: (item["tile"][w], i)),
            pl.BlockSpec((tile_m, tile_n), lambda i, j, w: (item["tile"][w], j)),
        ],
        out_specs=[pl.BlockSpec((None, tile_k, tile_n), lambda i, j, w: (item["group"][w], i, j))],
    )(lhs, grad, out)


def _call(
    kernel: Any,
    name: str,
    operands: tuple[jax.Array, ...],
    out: jax.ShapeDtypeStruct,
    *,
    items: int,
    scratch: tuple[Any, ...],
    flops: int,
    config: Config,
    interpret: Any,
) -> jax.Array:
    """One `pallas_call` over group sizes and offset in SMEM and big operands in HBM."""
    sizes, offset, *arrays = operands
    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    moved = sum(a.size * a.dtype.itemsize for a in arrays) + out.size * out.dtype.itemsize
    return pl.pallas_call(
        kernel,
        name=name,
        out_shape=out,
        in_specs=[smem, smem] + [hbm] * len(arrays),
        out_specs=hbm,
        scratch_shapes=[*scratch, *[pltpu.SMEM((items,), jnp.int32)] * 4],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=config.vmem_bytes),
        cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=0),
        interpret=interpret,
    )(sizes, offset, *arrays)


@functools.partial(jax.jit, static_argnames=("transpose_rhs", "out_dtype", "config", "interpret"))
def gmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    *,
    transpose_rhs: bool,
    out_dtype: Any,
    config: Config,
    interpret: Any,
) -> jax.Array:
    """The grouped product, without a gradient of its own: see `ragged_dot`.

    Args:
      lhs: [M, K]. rhs: [G, K, N], or [G, N, K] with `transpose_rhs`. Same dtype.
      group_sizes: [S] int32. group_offset: [1] int32, within 0..S-G.
    Returns: [M, N] in `out_dtype`.
    """
    m, k = lhs.shape
    n = rhs.shape[1 if transpose_rhs else 2]
    return _call(
        functools.partial(_gmm_kernel, config=config, transpose_rhs=transpose_rhs),
        "ragged_dot",
        (group_sizes, group_offset, lhs, rhs),
        jax.ShapeDtypeStruct((m, n), out_dtype),
        items=pl.cdiv(m, config.tile_m) + rhs.shape[0],
        scratch=(
            pltpu.VMEM((config.tile_m, config.tile_n) if k > config.tile_k else (8, LANES), jnp.float32),
        ),
        flops=2 * m * k * n,
        config=config,
        interpret=interpret,
    )


@functools.partial(jax.jit, static_argnames=("groups", "out_dtype", "config", "interpret"))
def gmm_weights(
    lhs: jax.Array,
    grad: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    *,
    groups: int,
    out_dtype: Any,
    config: Config,
    interpret: Any,
) -> jax.Array:
    """For each group, the product of its rows of `lhs` [M, K] and `grad` [M, N] over the rows.

    Returns: [groups, K, N] in `out_dtype`; zeros for a group without rows.
    """
    m, k = lhs.shape
    n = grad.shape[1]
    return _call(
        functools.partial(_gmm_weights_kernel, config=config),
        "ragged_dot_weights",
        (group_sizes, group_offset, lhs, grad),
        jax.ShapeDtypeStruct((groups, k, n), out_dtype),
        items=pl.cdiv(m, config.tile_m) + groups,
        scratch=(pltpu.VMEM((config.tile_k, config.tile_n), jnp.float32),),
        flops=2 * m * k * n,
        config=config,
        interpret=interpret,
    )
