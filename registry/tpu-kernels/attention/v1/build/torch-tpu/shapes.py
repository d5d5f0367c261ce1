"""What one kernel is made for, and how it divides its work."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

LANES, SUBLANES = 128, 8
# What the decode kernel keeps of an item from the start of its copies on.
WORK, BASE, FIRST, END, FRESH, COPIED, FIELDS = range(7)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def visible_pairs(queries: int, keys: int, causal: bool, window: int | None) -> int:
    """Pairs of a query and a key that it sees, without padding.

    Example:
      >>> visible_pairs(3, 3, True, None)
      6
    """
    if not causal:
        return queries * keys
    most = keys if window is None else window
    return sum(min(max(own, 0), most) for own in range(keys - queries + 1, keys + 1))


def at_keys(transposed: bool, *index: Any) -> tuple[Any, ...]:
    """An index whose last part is of keys, in a cache as it is stored."""
    return (*index[:-1], slice(None), index[-1]) if transposed else index


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a kernel is made for.

    Attributes:
      sequences, kv_heads, keys: B, H and S.
      rows: query rows of one kv head: G query heads times L new tokens.
      new: L, new tokens of a sequence.
      head_dim, value_dim: D and E.
      dtype: of everything but sinks.
      sinks: each query head has one.
      key_transposed, value_transposed: the cache comes as [B, H, D, S], keys on lanes.
      shared: the keys are the values, too.
      appends: the new tokens' keys and values are written to the cache.
    """

    sequences: int
    kv_heads: int
    keys: int
    rows: int
    new: int
    head_dim: int
    value_dim: int
    dtype: Any
    sinks: bool
    key_transposed: bool
    value_transposed: bool
    shared: bool = False
    appends: bool = False

    @property
    def caches(self) -> dict[str, tuple[int, bool]]:
        """The head dimension of each cache by name, and whether its keys are on lanes."""
        caches = {"key": (self.head_dim, self.key_transposed)}
        return caches if self.shared else caches | {"value": (self.value_dim, self.value_transposed)}

    @property
    def bounds(self) -> int:
        """Numbers that say what a sequence's keys are: see `decode_kernel.call`."""
        return 2 + 2 * self.new + 3 * self.appends

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def head_rows(self) -> int:
        """`rows`, padded: to a power of two if several heads share a register's 8, else to whole registers."""
        if self.rows > SUBLANES // 2:
            return round_up(self.rows, SUBLANES)
        return 1 << (self.rows - 1).bit_length()

    @property
    def granule(self) -> int:
        """An item begins at a multiple of so many keys."""
        return max(self.granule_of(self.key_transposed), self.granule_of(self.value_transposed))

    def granule_of(self, transposed: bool) -> int:
        """A copy is of a multiple of so many keys: those of one tile."""
        if transposed:
            return LANES
        tile = 32 // self.itemsize
        # XLA pads the axis to 8 keys only; a whole tile at its end would lie outside.
        return tile if self.keys % tile == 0 else SUBLANES

    @property
    def key_bytes(self) -> int:
        """Bytes in vector memory of one key of one head, and of its value."""
        lengths = self.caches.values()
        return sum(round_up(n, SUBLANES if turned else LANES) for n, turned in lengths) * self.itemsize


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel divides its work.

    Attributes:
      heads: kv heads of one item; divides H.
      block: keys of one item; a multiple of 128.
      unroll: items of a group, which are computed together.
      ring: groups that are in vector memory or on their way.
      chunks: grid steps, each with its share of the sequences and heads; two cores share them.
      vmem_bytes: vector memory the kernel may use.
    """

    heads: int
    block: int
    unroll: int
    ring: int
    chunks: int
    vmem_bytes: int

    def works(self, shape: Shape) -> int:
        """Pairs of a sequence and a group of heads in one chunk."""
        return shape.sequences * (shape.kv_heads // self.heads) // self.chunks

    def tile_rows(self, shape: Shape) -> int:
        """Query rows of one pair: those of its heads, padded to whole registers."""
        return round_up(self.heads * shape.head_rows, SUBLANES)


def stored_transposed(rows: int, columns: int) -> bool:
    """Whether XLA:TPU stores ``[..., rows, columns]`` with rows minor: where that pads less.

    Tiles have 128 lanes and 8 sublanes, or for a shorter axis 4, 2 or 1.

    Example:
      >>> stored_transposed(4096, 64)
      True
    """

    def padded(sublanes: int, lanes: int) -> int:
        return round_up(sublanes, min(8, 1 << (sublanes - 1).bit_length())) * round_up(lanes, LANES)

    return padded(columns, rows) < padded(rows, columns)
