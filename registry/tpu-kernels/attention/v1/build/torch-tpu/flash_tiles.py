"""How prefill and training attention is cut into tiles, and which of them are visited.

Each query sees one run of keys: causality, windows, padding and packed sequences all come to that. A block of queries
then needs the tiles of keys from the first of its runs to the end of the last, and within them those that all of its
queries see as a whole need no mask. These numbers, the *spans*, are in scalar memory before the kernels start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .decode_config import COMPILER_BYTES, VMEM_BYTES, VMEM_SHARE
from .shapes import LANES, SUBLANES, round_up, stored_transposed, visible_pairs

# Most queries, keys and heads that are computed together, and the sides of one product of theirs, which are those of
# the largest matrix units.
MOST_QUERIES, MOST_KEYS, MOST_HEADS, SIDE = 512, 512, 8, 256
# Of float32: a product is six of bfloat16, and a program of that many would take the compiler minutes.
MOST_QUERIES_F32, MOST_HEADS_F32 = 256, 2
# Keys that are in vector memory, where not all have room.
HELD = (16384, 4096, 1024, 512, 256, 128)
# Rows behind those of a value, of ones: the product with the weights then has their sums too.
ONES = 16
# The spans of a block of queries: chunks of keys that it needs; those that need no mask; the keys that it sees.
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
      queries: of one step, a multiple of 128.
      keys: of a tile that needs no mask, a multiple of `chunk`.
      chunk: keys of one product, and of a tile that needs a mask; a multiple of 128.
      held: keys of one step, a multiple of `keys`.
      heads: query heads of one step: all of `kv_heads` kv heads, or some of one.
      kv_heads: kv heads of one step.
      vmem_bytes: vector memory the kernel may use.
    """

    queries: int
    keys: int
    chunk: int
    held: int
    heads: int
    kv_heads: int
    vmem_bytes: int

    @property
    def width(self) -> int:
        """Queries of one product."""
        return SIDE if self.queries % SIDE == 0 else LANES

    @property
    def items(self) -> list[tuple[int, int]]:
        """The products of a chunk: query head and first query."""
        return [(head, begin) for head in range(self.heads) for begin in range(0, self.queries, self.width)]


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
    for most in (MOST_QUERIES, SIDE, LANES):
        for together, of in heads:
            wide = min(keys, most)
            chunk = SIDE if wide % SIDE == 0 else LANES
            whole = round_up(form.keys, wide)
            for held in [whole, *(n for n in HELD if n < whole and n % wide == 0)]:
                yield Blocks(min(queries, most), wide, chunk, held, together, of, limit)


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(min(number, most), 0, -1) if number % n == 0]


def step_bytes(form: Form, blocks: Blocks, products: int) -> int:
    """Vector memory of what each step of a kernel holds: q, k, v, an output like q, twice; and so many products."""
    rows = blocks.heads * blocks.queries * (_padded(form.head_dim) + _padded(form.value_dim))
    keys = blocks.kv_heads * blocks.held * (_padded(form.head_dim) + _padded(form.value_dim))
    places = 2 * SUBLANES * blocks.queries * (2 * blocks.heads + 2) * 4
    scores = blocks.chunk * (products * blocks.width + blocks.queries) * 4
    return 2 * (rows + keys) * form.itemsize + places + scores


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
        return (key + (blocks.chunk - 1)) // blocks.chunk

    fields = [
        seen_first // blocks.chunk,
        up(seen_end),
        up(first.max(-1)),
        end.min(-1) // blocks.chunk,
        seen_first,
        seen_end,
    ]
    return jnp.stack(fields, axis=-1).astype(jnp.int32).reshape(-1)


class Grid:
    """The steps of a kernel, and the blocks that each is given.

    Axes: sequence, kv heads, part of their query heads, block of queries, held keys among those it needs.
    """

    def __init__(self, form: Form, blocks: Blocks) -> None:
        self.form, self.blocks = form, blocks
        self.parts = form.group * blocks.kv_heads // blocks.heads
        self.query_blocks = -(-form.queries // blocks.queries)
        self.chunks = blocks.held // blocks.chunk
        self.steps = -(-form.keys // blocks.held)
        self.keys = self.steps * blocks.held
        if form.window is not None:
            together = form.window + blocks.queries - 1
            self.steps = min(self.steps, max(together - 2, 0) // blocks.held + 2)
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
        size, turned = self.blocks.held, self.form.key_turned(dim)

        def index(b: Any, h: Any, g: Any, i: Any, j: Any, spans: Any, *_: Any) -> Any:
            at = (b * self.query_blocks + i) * FIELDS
            last = jnp.maximum(spans[at + END] - 1, 0)
            # A step without work stays where the last one was, which costs no copy.
            place = jnp.minimum(
                jax.lax.div(spans[at + FIRST], self.chunks) + j, jax.lax.div(last, self.chunks)
            )
            return b * self.shape[1] + h, *((0, place) if turned else (place, 0))

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
