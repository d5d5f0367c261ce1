"""How prefill and training attention is cut into tiles, and which of them are visited.

Each query sees one run of keys: causality, windows, padding and packed sequences all come to that. A block of queries
then needs the tiles of keys from the first of its runs to the end of the last, and within them those that all of its
queries see as a whole need no mask. These numbers, the *spans*, are in scalar memory before the kernels start.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .decode_config import COMPILER_BYTES, VMEM_BYTES, VMEM_SHARE
from .shapes import LANES, SUBLANES, round_up, stored_transposed, visible_pairs

# Longest sides of a tile, and how many query heads are computed together: two products of several are under way
# while a third one's softmax is computed.
MOST_QUERIES, MOST_KEYS, MOST_HEADS, CHUNK = 512, 512, 8, 256
# Of float32: a product is six of bfloat16, and a program of that many would take the compiler minutes.
MOST_QUERIES_F32, MOST_HEADS_F32 = 256, 2
# Rows behind those of a value, of ones: the product with the weights then has their sums too.
ONES = 16
# The spans of a block of queries: tiles of keys that it needs; those that need no mask; the keys that it sees.
FIRST, END, WHOLE_FIRST, WHOLE_END, SEEN_FIRST, SEEN_END, FIELDS = range(7)


@dataclasses.dataclass(frozen=True)
class Form:
    """What a kernel is made for.

    Attributes:
      sequences, heads, kv_heads, queries, keys: B, Hq, H, L and S.
      head_dim, value_dim: D and E.
      dtype: of queries, keys and values.
      causal: query i sees keys up to S - L + i.
      window: with `causal`, only the newest so many of them.
      softcap: scores x become ``softcap * tanh(x / softcap)``.
      scale: factor of the scores.
      sinks: each query head has one.
    """

    sequences: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    dtype: Any
    causal: bool
    window: int | None
    softcap: float | None
    scale: float
    sinks: bool

    @property
    def group(self) -> int:
        """G, query heads of a kv head."""
        return self.heads // self.kv_heads

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, of all heads."""
        one = visible_pairs(self.queries, self.keys, self.causal, self.window)
        return self.sequences * self.heads * one

    @property
    def ones_row(self) -> int:
        """Where the ones behind a value begin."""
        return round_up(self.value_dim, ONES)

    def query_turned(self, dim: int) -> bool:
        """Whether [B, Hq, L, dim] comes as [B, Hq, dim, L], as XLA stores it."""
        return stored_transposed(self.queries, dim)

    def key_turned(self, dim: int) -> bool:
        """Whether [B, H, S, dim] comes as [B, H, dim, S]."""
        return stored_transposed(self.keys, dim)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a kernel divides its work.

    Attributes:
      queries, keys: sides of a tile, multiples of 128.
      heads: query heads of one step: all of `kv_heads` kv heads, or some of one.
      kv_heads: kv heads of one step.
      chunk: keys of one product.
      vmem_bytes: vector memory the kernel may use.
    """

    queries: int
    keys: int
    heads: int
    kv_heads: int
    chunk: int
    vmem_bytes: int


def choose(form: Form, tpu: str, needed: Callable[[Form, Blocks], int]) -> Blocks | None:
    """The largest blocks whose buffers have room in vector memory; None where not even the smallest have.

    Args:
      needed: bytes that a kernel's buffers take.
    """
    limit = int(VMEM_BYTES[tpu] * VMEM_SHARE)
    for blocks in _candidates(form, limit):
        if needed(form, blocks) + COMPILER_BYTES <= limit:
            return blocks
    return None


def _candidates(form: Form, limit: int) -> Iterator[Blocks]:
    narrow = form.itemsize < 4
    most_heads = MOST_HEADS if narrow else MOST_HEADS_F32
    heads = [(n, 1) for n in _divisors(form.group, most_heads)]
    if form.group < most_heads:
        several = _divisors(form.kv_heads, most_heads // form.group)
        heads = [(n * form.group, n) for n in several if n > 1] + heads
    queries = min(MOST_QUERIES if narrow else MOST_QUERIES_F32, round_up(form.queries, LANES))
    keys = min(MOST_KEYS, round_up(form.keys, LANES))
    for most in (MOST_QUERIES, 256, LANES):
        for together, of in heads:
            wide = min(keys, most)
            chunk = CHUNK if wide % CHUNK == 0 else LANES
            yield Blocks(min(queries, most), wide, together, of, chunk, limit)


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(min(number, most), 0, -1) if number % n == 0]


def step_bytes(form: Form, blocks: Blocks, tiles: int) -> int:
    """Vector memory of what each step of a kernel holds: q, k, v, an output like q, twice; and `tiles` of scores."""
    rows = blocks.heads * blocks.queries * (_padded(form.head_dim) + _padded(form.value_dim))
    keys = blocks.kv_heads * blocks.keys * (_padded(form.head_dim) + _padded(form.value_dim))
    numbers = 2 * (rows + keys) + keys
    places = 2 * SUBLANES * blocks.queries * (2 * blocks.heads + 2) * 4
    return numbers * form.itemsize + places + tiles * blocks.chunk * blocks.queries * 4


def _padded(dim: int) -> int:
    return round_up(dim, LANES)


def spans(first: jax.Array, end: jax.Array, blocks: Blocks) -> jax.Array:
    """The spans of each block of queries, flat: int32 [B * blocks * FIELDS].

    Args:
      first, end: each query's run of keys, int32 [B, L]; 0, 0 for none. L is a multiple of the block.
    """
    first, end = (x.reshape(x.shape[0], -1, blocks.queries) for x in (first, end))
    seen_end = end.max(-1)
    seen_first = jnp.where(first < end, first, jnp.iinfo(jnp.int32).max).min(-1)
    seen_first = jnp.minimum(seen_first, seen_end)

    def up(key: jax.Array) -> jax.Array:
        return (key + (blocks.keys - 1)) // blocks.keys

    fields = [
        seen_first // blocks.keys,
        up(seen_end),
        up(first.max(-1)),
        end.min(-1) // blocks.keys,
        seen_first,
        seen_end,
    ]
    return jnp.stack(fields, axis=-1).astype(jnp.int32).reshape(-1)


class Grid:
    """The steps of a kernel, and the blocks that each is given.

    Axes: sequence, kv heads, part of their query heads, block of queries, tile of keys among those it needs.
    """

    def __init__(self, form: Form, blocks: Blocks) -> None:
        self.form, self.blocks = form, blocks
        self.parts = form.group * blocks.kv_heads // blocks.heads
        self.query_blocks = -(-form.queries // blocks.queries)
        self.key_tiles = -(-form.keys // blocks.keys)
        self.steps = self.key_tiles
        if form.window is not None:
            together = form.window + blocks.queries - 1
            self.steps = min(self.steps, max(together - 2, 0) // blocks.keys + 2)
        self.shape = (
            form.sequences,
            form.kv_heads // blocks.kv_heads,
            self.parts,
            self.query_blocks,
            self.steps,
        )

    def _query_head(self, b: Any, h: Any, g: Any) -> Any:
        return (b * self.shape[1] + h) * self.parts + g

    def of_queries(self, dim: int) -> pl.BlockSpec:
        """Blocks of [B * Hq, L, dim], or turned."""
        size, turned = self.blocks.queries, self.form.query_turned(dim)
        return pl.BlockSpec(
            (self.blocks.heads, *((dim, size) if turned else (size, dim))),
            lambda b, h, g, i, j, *_: (self._query_head(b, h, g), *((0, i) if turned else (i, 0))),
        )

    def of_keys(self, dim: int) -> pl.BlockSpec:
        """Blocks of [B * H, S, dim], or turned."""
        size, turned = self.blocks.keys, self.form.key_turned(dim)

        def index(b: Any, h: Any, g: Any, i: Any, j: Any, spans: Any, *_: Any) -> Any:
            at = (b * self.query_blocks + i) * FIELDS
            # A step without work stays at its last tile, which costs no copy.
            tile = jnp.clip(spans[at + FIRST] + j, 0, jnp.maximum(spans[at + END] - 1, 0))
            return b * self.shape[1] + h, *((0, tile) if turned else (tile, 0))

        return pl.BlockSpec((self.blocks.kv_heads, *((dim, size) if turned else (size, dim))), index)

    def of_rows(self) -> pl.BlockSpec:
        """Blocks of [B * Hq, 1, L], a number for each query."""
        return pl.BlockSpec(
            (self.blocks.heads, 1, self.blocks.queries),
            lambda b, h, g, i, j, *_: (self._query_head(b, h, g), 0, i),
        )

    def of_runs(self) -> pl.BlockSpec:
        """Blocks of [B, 1, L]."""
        return pl.BlockSpec((1, 1, self.blocks.queries), lambda b, h, g, i, j, *_: (b, 0, i))


class Step:
    """One step of a kernel's grid, as the kernel sees it."""

    def __init__(self, grid: Grid, ref: Any) -> None:
        self.grid, self._ref = grid, ref
        self.sequence, self.kv_heads, self.part, self.block, self.place = (pl.program_id(n) for n in range(5))
        self._spans = (self.sequence * grid.query_blocks + self.block) * FIELDS
        self.tile = self.span(FIRST) + self.place
        self.is_first, self.is_last = self.place == 0, self.place == grid.steps - 1

    def span(self, field: int) -> Any:
        """A number of this block of queries."""
        return self._ref.spans[self._spans + field]

    def head(self, local: Any) -> Any:
        """The query head, among those of all sequences, that is this step's `local`-th."""
        return self.grid._query_head(self.sequence, self.kv_heads, self.part) * self.grid.blocks.heads + local

    def visit(self, compute: Callable[[bool], None]) -> None:
        """``compute(masked)``, if the block of queries needs this tile."""
        live = self.tile < self.span(END)
        whole = (self.tile >= self.span(WHOLE_FIRST)) & (self.tile < self.span(WHOLE_END))
        pl.when(live & whole)(functools.partial(compute, False))
        pl.when(live & ~whole)(functools.partial(compute, True))

    def key_places(self, chunk: int, shape: tuple[int, int], axis: int) -> jax.Array:
        """Which key of the sequence each number of a chunk is of."""
        begin = self.tile * self.grid.blocks.keys + chunk * self.grid.blocks.chunk
        return begin + jax.lax.broadcasted_iota(jnp.int32, shape, axis)

    def visible(self, chunk: int, columns: slice) -> jax.Array:
        """Which keys of a chunk, in rows, which queries see."""
        first, end = (run[0, :, columns] for run in (self._ref.first, self._ref.end))
        key = self.key_places(chunk, (self.grid.blocks.chunk, first.shape[1]), 0)
        return (key >= first) & (key < end)

    def items(self) -> list[tuple[int, int, int]]:
        """The products of a step: query head, its kv head, chunk of keys."""
        blocks = self.grid.blocks
        group = blocks.heads // blocks.kv_heads
        chunks = range(blocks.keys // blocks.chunk)
        return [(head, head // group, chunk) for head in range(blocks.heads) for chunk in chunks]


def pipelined(
    items: list[Any], produce: Callable[..., Any], consume: Callable[..., None], ahead: int = 2
) -> None:
    """``consume(*item, produce(*item))`` for each, `ahead` products before their results are needed.

    The core issues in order: matrix units are busy during a softmax only with what was issued before it.
    """
    ready = [produce(*item) for item in items[:ahead]]
    for place, item in enumerate(items):
        result = ready.pop(0)
        if place + ahead < len(items):
            ready.append(produce(*items[place + ahead]))
        consume(*item, result)


def columns_of(width: int) -> list[slice]:
    """Strips of a tile's queries, narrow enough that a strip of scores stays in registers."""
    return [slice(begin, begin + LANES) for begin in range(0, width, LANES)]


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int], *, exact: bool) -> jax.Array:
    """Product in f32 over one axis of each."""
    if exact:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def compiler_params(blocks: Blocks, parallel: int) -> pltpu.CompilerParams:
    """Of a kernel whose first `parallel` axes may be in any order."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel",) * parallel + ("arbitrary",) * (5 - parallel),
        vmem_limit_bytes=blocks.vmem_bytes,
    )
