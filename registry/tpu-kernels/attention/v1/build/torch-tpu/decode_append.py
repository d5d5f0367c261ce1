"""New keys and values of a decode step on their way into the cache.

An item that holds their places has them put in once it is in vector memory, and the tiles touched are written back
from a copy of their own: the item may be masked, or its slot filled again, before they have arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .shapes import BASE, END, LANES, SUBLANES, WORK, Config, Shape, at_keys, round_up

F32 = jnp.float32


def scratch_of(shape: Shape, config: Config, *, whole: bool = False) -> dict[str, Any]:
    """The append's scratch shapes by name."""
    slots, works = config.ring * config.unroll, config.works(shape)
    tiles = _tiles(shape, whole)
    scratch: dict[str, Any] = {}
    for name, (dim, transposed) in shape.caches.items():
        keys = _tile(shape, config, transposed, whole)
        tile = (dim, keys) if transposed else (keys, dim)
        scratch[f"new_{name}"] = pltpu.VMEM((works, new_rows(shape, config), dim), shape.dtype)
        scratch[f"{name}_touched"] = pltpu.VMEM((slots, tiles, config.heads, *tile), shape.dtype)
        scratch[f"{name}_pending"] = pltpu.SMEM((slots, tiles), jnp.int32)
    return scratch | {"written": pltpu.SemaphoreType.DMA((config.ring,))}


def new_rows(shape: Shape, config: Config) -> int:
    """Rows of one work's new keys, by head and token, padded to whole registers."""
    return round_up(config.heads * shape.new, SUBLANES)


def _tiles(shape: Shape, whole: bool) -> int:
    """Tiles of an item that new keys may touch."""
    return 1 if whole or shape.new == 1 else 2


def _tile(shape: Shape, config: Config, transposed: bool, whole: bool) -> int:
    """Keys that are written back at a time."""
    if whole:
        return config.block
    return LANES if transposed else 32 // shape.itemsize


class Append:
    """Puts new keys and values into the items that hold their places, and writes these tiles back.

    Args:
      ref: the kernel's refs by name.
      bounds: of a work: the place of its first new token, and the first and the end of the keys to be written.
      whole: an item is always a whole block, and so is what is written back.
    """

    def __init__(
        self, ref: Any, shape: Shape, config: Config, bounds: Callable[[Any], list[Any]], *, whole: bool
    ) -> None:
        self._ref, self._shape, self._config, self._bounds, self._whole = ref, shape, config, bounds, whole
        self._chunk = pl.program_id(0) * config.works(shape)
        for name in shape.caches:
            pending = self._of(name, "pending")
            for slot in range(pending.shape[0]):
                for tile in range(pending.shape[1]):
                    pending[slot, tile] = 0

    def _of(self, name: str, what: str) -> Any:
        return getattr(self._ref, f"{name}_{what}")

    def put(self, group: Any) -> None:
        """Changes a group's items, which are there, and starts to write back what was touched."""
        self.wait(group)
        for each in range(self._config.unroll):
            for name in self._shape.caches:
                self._put(group, group * self._config.unroll + each, name)

    def _put(self, group: Any, slot: Any, name: str) -> None:
        shape, item = self._shape, self._ref.items
        there = item[slot, END] > 0
        copied = self._config.block if self._whole else item[slot, END]
        place, first, end = (bound - item[slot, BASE] for bound in self._bounds(item[slot, WORK]))
        first, end = jnp.maximum(first, 0), jnp.where(there, jnp.minimum(end, copied), 0)
        transposed = shape.caches[name][1]
        keys, granule = _tile(shape, self._config, transposed, self._whole), shape.granule_of(transposed)
        for tile in range(_tiles(shape, self._whole)):
            begin = 0 if self._whole else pl.multiple_of((first & -keys) + tile * keys, keys)
            written = keys
            if keys > granule and not self._whole:
                # The cache's last tile may be half of one.
                written = jnp.minimum(keys, ((item[slot, END] + granule - 1) & -granule) - begin)
            touched = (first < end) & (begin < end)
            self._of(name, "pending")[slot, tile] = jnp.where(touched, written, 0)

            @pl.when(touched)
            def _(begin: Any = begin, tile: int = tile) -> None:
                for head in range(self._config.heads):
                    index = at_keys(transposed, slot, head, pl.ds(begin, keys))
                    cached = getattr(self._ref, name)[index]
                    key = begin + jax.lax.broadcasted_iota(jnp.int32, cached.shape, 1 if transposed else 0)
                    new = self._placed(item[slot, WORK], name, head, key - place, cached)
                    changed = jnp.where((key >= first) & (key < end), new, cached)
                    getattr(self._ref, name)[index] = self._of(name, "touched")[slot, tile, head] = changed
                self._copy(group, slot, name, tile, item[slot, BASE] + begin).start()

    def _placed(self, work: Any, name: str, head: int, token: jax.Array, cached: jax.Array) -> jax.Array:
        """The new key of `token` (of a head of a work) wherever there is one: of the shape of both."""
        new, tokens = getattr(self._ref, f"new_{name}")[work], self._shape.new
        if not self._shape.caches[name][1]:
            placed = jnp.zeros(cached.shape, F32)
            for each in range(tokens):
                row = new[head * tokens + each][None].astype(F32)
                placed = jnp.where(token == each, row, placed)
            return placed.astype(cached.dtype)
        # On lanes: a product with the places as ones, and of this head's rows alone, for 0 times NaN is NaN.
        row = jax.lax.broadcasted_iota(jnp.int32, new.shape, 0)
        own = (row >= head * tokens) & (row < (head + 1) * tokens)
        token = token[:1]
        places = (
            jax.lax.broadcasted_iota(jnp.int32, (new.shape[0], token.shape[1]), 0) == head * tokens + token
        )
        placed = jax.lax.dot_general(
            jnp.where(own, new, jnp.zeros_like(new)),
            jnp.where(places, 1.0, 0.0).astype(new.dtype),
            (((0,), (0,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST if new.dtype == F32 else jax.lax.Precision.DEFAULT,
            preferred_element_type=F32,
        )
        return placed.astype(cached.dtype)

    def _copy(self, group: Any, slot: Any, name: str, tile: int, begin: Any) -> Any:
        transposed = self._shape.caches[name][1]
        granule = self._shape.granule_of(transposed)
        keys = _tile(self._shape, self._config, transposed, self._whole)
        if keys > granule and not self._whole:
            keys = pl.multiple_of(self._of(name, "pending")[slot, tile], granule)
        work, there = self._chunk + self._ref.items[slot, WORK], pl.ds(pl.multiple_of(begin, granule), keys)
        return pltpu.make_async_copy(
            self._of(name, "touched").at[at_keys(transposed, slot, tile, slice(None), pl.ds(0, keys))],
            self._of(name, "out").at[at_keys(transposed, work, slice(None), there)],
            self._ref.written.at[group],
        )

    def wait(self, group: Any) -> None:
        """Waits until what `put` last started for a group is written."""
        for each in range(self._config.unroll):
            slot = group * self._config.unroll + each
            for name in self._shape.caches:
                pending = self._of(name, "pending")
                for tile in range(pending.shape[1]):

                    @pl.when(pending[slot, tile] > 0)
                    def _(slot: Any = slot, name: str = name, tile: int = tile) -> None:
                        self._copy(group, slot, name, tile, 0).wait()

    def finish(self) -> None:
        """Waits until all is written."""
        for group in range(self._config.ring):
            self.wait(group)
