"""What both kernels are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .tiles import LANES, powers_of_two


def aligned(row: Any, tile: int) -> Any:
    """The row that begins the row tile of `row`."""
    return row // tile * tile


def product(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """`a` times `b` over one axis of each, accumulated in f32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def advance(slot: Any, slots: int) -> Any:
    """The slot of a ring after `slot`."""
    return jnp.where(slot + 1 == slots, 0, slot + 1)


def each_part(size: int, part: int, body: Callable[[Any, int, Any], Any], state: Any) -> Any:
    """`state = body(number, length, state)` for each part of an axis; the last one may be shorter."""
    whole, rest = divmod(size, part)
    if whole == 1:
        state = body(0, part, state)
    else:
        state = jax.lax.fori_loop(0, whole, lambda number, s: body(number, part, s), state)
    return body(whole, rest, state) if rest else state


def share_columns(ref: Any, shares: int) -> Any:
    """The columns, of the last axis, that this step of the grid makes where there are several `shares`."""
    if shares == 1:
        return ref
    columns = ref.shape[-1] // shares
    first = pl.multiple_of(pl.program_id(0) * columns, LANES)
    return ref.at[(*[slice(None)] * (len(ref.shape) - 1), pl.ds(first, columns))]


def with_height(rows: Any, heights: list[int], body: Callable[[int], None]) -> None:
    """`body(height)` for the smallest of `heights`, ascending, that covers `rows`: shapes of products are static.

    The tallest is asked for first: most chunks are whole.
    """
    *lower, tallest = heights
    if not lower:
        body(tallest)
        return
    jax.lax.cond(rows > lower[-1], lambda: body(tallest), lambda: with_height(rows, lower, body))


class RowCopies:
    """Copies of rows between a matrix in HBM and the buffers of a ring in vector memory.

    How many rows is known only when the kernel runs, the size of a copy before: so one copy where the buffer is full,
    else one a power of two.

    Args:
      hbm: ref [M, columns].
      ring: ref [buffers, rows, columns].
      semaphores: one a buffer.
      inwards: from HBM; else to it.
      tile: row tile; all rows and counts are multiples of it.
    """

    def __init__(self, hbm: Any, ring: Any, semaphores: Any, *, inwards: bool, tile: int) -> None:
        self._hbm, self._ring, self._semaphores, self._inwards = hbm, ring, semaphores, inwards
        self._most = min(hbm.shape[0], ring.shape[1])
        self._sizes = powers_of_two(1 << (self._most - 1).bit_length() - 1, tile)
        self._tile = tile

    def start(self, buffer: Any, first: Any, count: Any) -> None:
        """Starts to copy `count` rows, from or to `first` on in HBM."""
        self._each(buffer, first, count, lambda copy: copy.start())

    def wait(self, buffer: Any, count: Any) -> None:
        """Waits for the copies of `count` rows that were started."""
        self._each(buffer, 0, count, lambda copy: copy.wait())

    def _each(self, buffer: Any, first: Any, count: Any, do: Callable[[Any], None]) -> None:
        def copy(done: Any, size: int) -> None:
            hbm = self._hbm.at[pl.ds(pl.multiple_of(first + done, self._tile), size)]
            local = self._ring.at[buffer, pl.ds(pl.multiple_of(done, self._tile), size)]
            ends = (hbm, local) if self._inwards else (local, hbm)
            do(pltpu.make_async_copy(*ends, self._semaphores.at[buffer]))

        def in_parts() -> None:
            done = jnp.int32(0)
            for size in self._sizes:
                pl.when(count & size != 0)(functools.partial(copy, done, size))
                done += count & size

        jax.lax.cond(count == self._most, lambda: copy(0, self._most), in_parts)
