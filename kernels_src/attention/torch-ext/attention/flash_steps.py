"""A step of a flash attention kernel: which keys it visits, and in which order it works on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .flash_tiles import END, FIELDS, FIRST, SEEN_END, SEEN_FIRST, WHOLE_END, WHOLE_FIRST, Blocks, Grid
from .shapes import LANES


@dataclasses.dataclass(frozen=True)
class Tile:
    """Keys of a step that are computed together.

    Attributes:
      place: the first one's among those that the step holds.
      key: the first one's in the sequence.
      parity: 0 or 1, in turn.
      keys: how many.
      masked: not every query sees all of them.
    """

    place: Any
    key: Any
    parity: Any
    keys: int
    masked: bool

    @property
    def held(self) -> Any:
        """Where they are held."""
        return pl.ds(self.place, self.keys)

    def part(self, keys: slice) -> Any:
        """Where some of them are held."""
        return pl.ds(self.place + keys.start, keys.stop - keys.start)


@dataclasses.dataclass(frozen=True)
class Item:
    """Part of a tile: a chunk of its keys for some queries of a head.

    Attributes:
      head, kv_head: among those of the step.
      keys: where the chunk is in its tile.
      queries: where those are in their block.
    """

    head: int
    kv_head: int
    keys: slice
    queries: slice

    def strips(self) -> list[tuple[slice, slice]]:
        """The queries in strips that are narrow enough for registers: in the item's product, and in the block."""
        width, begin = self.queries.stop - self.queries.start, self.queries.start
        return [
            (slice(at, at + LANES), slice(begin + at, begin + at + LANES)) for at in range(0, width, LANES)
        ]


class Work(Protocol):
    """What a kernel does with a tile.

    The products are made `ahead` items before their use, also those of the next tile: the core issues in order, and its
    matrix units are busy during a softmax only with what was issued before it.
    """

    ahead: int

    def prepare(self, tile: Tile) -> None:
        """What the tile's products need; the tile before may be in use."""

    def produce(self, tile: Tile, item: Item) -> tuple[jax.Array, ...]:
        """Products, [keys, queries]."""

    def enter(self, tile: Tile) -> None:
        """What the rest needs; the tile before is done."""

    def fold(self, tile: Tile, item: Item, *products: jax.Array) -> None:
        """Takes the products into the results."""


class Step:
    """One step of a kernel's grid, as the kernel sees it."""

    def __init__(self, grid: Grid, ref: Any) -> None:
        self.grid, self._ref = grid, ref
        self.sequence, self.kv_heads, self.part, self.block, self.place = (pl.program_id(n) for n in range(5))
        self._spans = (self.sequence * grid.query_blocks + self.block) * FIELDS
        self._begin = (jax.lax.div(self.span(FIRST), grid.chunks) + self.place) * grid.chunks
        self.is_first, self.is_last = self.place == 0, self.place == grid.steps - 1

    def span(self, field: int) -> Any:
        """A number of this block of queries."""
        return self._ref.spans[self._spans + field]

    def head(self, local: Any) -> Any:
        """The query head, among those of all sequences, that is this step's `local`-th."""
        return self.grid._query_head(self.sequence, self.kv_heads, self.part) * self.grid.blocks.heads + local

    def visit(self, work: Work) -> None:
        """Does the work on all keys that the step holds and its queries see: whole tiles, then chunks with a mask."""
        blocks, chunks = self.grid.blocks, self.grid.chunks
        in_tile = blocks.keys // blocks.chunk
        first, end, whole_first, whole_end = (
            jnp.clip(self.span(field) - self._begin, 0, chunks)
            for field in (FIRST, END, WHOLE_FIRST, WHOLE_END)
        )
        whole_first = jax.lax.div(jnp.maximum(whole_first, first) + (in_tile - 1), in_tile)
        whole_end = jax.lax.div(jnp.minimum(whole_end, end), in_tile)
        count = jnp.maximum(whole_end - whole_first, 0)
        before = jnp.where(count > 0, whole_first * in_tile, end) - first
        after = jnp.where(count > 0, end - whole_end * in_tile, 0)

        def at_ends(index: Any) -> Any:
            return jnp.where(index < before, first + index, whole_end * in_tile + index - before)

        self._sweep(work, count, lambda index: (whole_first + index) * in_tile, blocks.keys, masked=False)
        self._sweep(work, before + after, at_ends, blocks.chunk, masked=True)

    def _sweep(
        self, work: Work, count: Any, chunk_of: Callable[[Any], Any], keys: int, *, masked: bool
    ) -> None:
        """Does the work on `count` tiles, which begin at chunks."""
        blocks, kept = self.grid.blocks, self._ref.ahead
        items = list(_items(blocks, keys))
        ahead = min(work.ahead, len(items))

        def tile(index: Any, parity: Any) -> Tile:
            chunk = chunk_of(index)
            place = pl.multiple_of(chunk * blocks.chunk, blocks.chunk)
            return Tile(place, (self._begin + chunk) * blocks.chunk, parity, keys, masked)

        def keep(place: int, products: tuple[jax.Array, ...]) -> None:
            for number, product in enumerate(products):
                kept[place, number] = product

        @pl.when(count > 0)
        def _() -> None:
            first = tile(0, 0)
            work.prepare(first)
            for place, item in enumerate(items[:ahead]):
                keep(place, work.produce(first, item))

        def visit(index: Any, carry: Any) -> Any:
            this = tile(index, index & 1)
            # After the last tile that one again, in vain.
            following = tile(jnp.minimum(index + 1, count - 1), (index + 1) & 1)
            work.prepare(following)
            work.enter(this)
            ready = [tuple(kept[place, number] for number in range(kept.shape[1])) for place in range(ahead)]
            upcoming = [
                *((this, item) for item in items[ahead:]),
                *((following, item) for item in items[:ahead]),
            ]
            for item, (of, another) in zip(items, upcoming, strict=True):
                ready.append(work.produce(of, another))
                work.fold(this, item, *ready.pop(0))
            for place, products in enumerate(ready):
                keep(place, products)
            return carry

        jax.lax.fori_loop(0, count, visit, 0)

    def turn_rows(self, tile: Tile) -> None:
        """Makes rows of a tile's keys and values, where they are held turned and the kernel has room for rows."""
        ref = vars(self._ref)
        for name in ("key", "value"):
            if f"{name}_rows" in ref:
                for head in range(ref[name].shape[0]):
                    ref[f"{name}_rows"][tile.parity, head, : tile.keys] = ref[name][head, :, tile.held].T

    def rows(self, name: str, tile: Tile, item: Item) -> jax.Array:
        """Keys or values of an item, by `name`: [keys, dim]."""
        ref = vars(self._ref)
        if f"{name}_rows" in ref:
            return ref[f"{name}_rows"][tile.parity, item.kv_head, item.keys]
        return ref[name][item.kv_head, tile.part(item.keys)]

    def seen(self, tile: Tile, shape: tuple[int, int], axis: int) -> jax.Array:
        """Which keys of a tile some query sees."""
        key = tile.key + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return (key >= self.span(SEEN_FIRST)) & (key < self.span(SEEN_END))

    def mark_visible(self, tile: Tile) -> None:
        """Writes down which keys of a tile, in rows, which queries see: once for all heads."""
        for begin in range(0, self.grid.blocks.queries, LANES):
            columns = slice(begin, begin + LANES)
            first, end = (run[0, :, columns] for run in (self._ref.first, self._ref.end))
            key = tile.key + jax.lax.broadcasted_iota(jnp.int32, (tile.keys, LANES), 0)
            self._ref.visible[:, columns] = ((key >= first) & (key < end)).astype(jnp.int32)


def _items(blocks: Blocks, keys: int) -> Iterator[Item]:
    """The items of a tile; those that add to the same sums are far apart."""
    for chunk in range(0, keys, blocks.chunk):
        for head, begin in blocks.items:
            of = head // (blocks.heads // blocks.kv_heads)
            yield Item(head, of, slice(chunk, chunk + blocks.chunk), slice(begin, begin + blocks.width))


def ahead_scratch(blocks: Blocks, ahead: int, products: int) -> Any:
    """Scratch for the products that are made ahead."""
    return pltpu.VMEM((ahead, products, blocks.chunk, blocks.width), jnp.float32)
