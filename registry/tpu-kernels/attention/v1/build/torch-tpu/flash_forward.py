"""Attention of many queries, in one Pallas call, with the log-sum-exp that its gradient needs.

Axis letters::

    B  sequences       L  queries      D  head dimension of queries and keys
    Hq query heads     S  keys         E  head dimension of values
    H  kv heads

A step computes a tile, a block of queries of several heads on a block of keys, everything turned: scores are
[keys, queries]. A softmax then reduces over rows, without moving numbers between lanes, and the product with the
values, ``v^T [E, keys] · weights [keys, queries]``, has the weights as the side that stays in the matrix unit: its
whole width is used, where ``weights · v`` would use E columns of it::

    for each chunk of keys, head and 256 queries, the products four such items ahead of the softmax:
        s = k · q^T, capped, masked where the tile needs it; queries are scaled, once
        new maximum; w = 2 ** (s - maximum)
        sums = 2 ** (old maximum - maximum) * sums + [v^T; 1] · w

The rows of ones behind v^T give the weights' sums by the same product. Values of keys that no query of the block sees
are zeroed, as 0 times NaN is NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .decode_kernel import LOG2_E, MASKED, NO_MAXIMUM
from .flash_steps import Item, Step, Tile, ahead_scratch
from .flash_tiles import (
    ONES,
    Blocks,
    Form,
    Grid,
    compiler_params,
    dot,
    spans,
    step_bytes,
)
from .shapes import LANES, SUBLANES, round_up

F32 = jnp.float32
# Products of q and k that are made ahead of their softmax.
AHEAD = 4


def _scratch(form: Form, blocks: Blocks) -> dict[str, Any]:
    rows = form.ones_row + ONES
    scratch = {
        "ahead": ahead_scratch(blocks, AHEAD, products=1),
        "scaled": pltpu.VMEM((blocks.heads, blocks.queries, form.head_dim), form.dtype),
        "maximum": pltpu.VMEM((blocks.heads, 1, blocks.queries), F32),
        "sums": pltpu.VMEM((blocks.heads, rows, blocks.queries), F32),
        "value_columns": pltpu.VMEM((blocks.kv_heads, rows, blocks.keys), form.dtype),
        "visible": pltpu.VMEM((blocks.chunk, blocks.queries), jnp.int32),
    }
    if form.key_turned(form.head_dim):
        scratch["key_rows"] = pltpu.VMEM((2, blocks.kv_heads, blocks.keys, form.head_dim), form.dtype)
    return scratch


def vmem_bytes(form: Form, blocks: Blocks) -> int:
    """Vector memory that the kernel takes."""
    dim, rows = round_up(form.head_dim, LANES), form.ones_row + ONES
    sums = blocks.heads * blocks.queries * ((rows + SUBLANES) * 4 + dim * form.itemsize)
    copies = blocks.kv_heads * blocks.keys * (2 * dim + rows) * form.itemsize
    return step_bytes(form, blocks, products=2 * AHEAD + 4) + sums + copies


@dataclasses.dataclass(frozen=True)
class _Work:
    """What is done with a tile."""

    step: Step
    ref: Any
    exact: bool
    ahead: int = AHEAD

    def prepare(self, tile: Tile) -> None:
        self.step.turn_rows(tile)

    def produce(self, tile: Tile, item: Item) -> tuple[jax.Array]:
        key, query = self.step.rows("key", tile, item), self.ref.scaled[item.head, item.queries]
        return (dot(key, query, (1, 1), exact=self.exact),)

    def enter(self, tile: Tile) -> None:
        ref, step = self.ref, self.step
        dim = step.grid.form.value_dim
        for head in range(ref.value.shape[0]):
            turned = step.grid.form.key_turned(dim)
            value = ref.value[head, :, tile.held] if turned else ref.value[head, tile.held].T
            if tile.masked:
                value = jnp.where(step.seen(tile, value.shape, 1), value, jnp.zeros_like(value))
            ref.value_columns[head, :dim, : tile.keys] = value
        if tile.masked:
            step.mark_visible(tile)

    def fold(self, tile: Tile, item: Item, *products: jax.Array) -> None:
        ref, form = self.ref, self.step.grid.form
        weights, shrink = [], []
        for local, columns in item.strips():
            x = capped(products[0][:, local], form)
            if tile.masked:
                x = jnp.where(ref.visible[:, columns] > 0, x, MASKED)
            before = ref.maximum[item.head, :, columns]
            maximum = jnp.maximum(before, jnp.max(x, axis=0, keepdims=True))
            ref.maximum[item.head, :, columns] = maximum
            weights.append(jnp.exp2(x - maximum).astype(form.dtype))
            shrink.append(jnp.exp2(before - maximum))
        value = ref.value_columns[item.kv_head, :, item.keys]
        sums = dot(value, jnp.concatenate(weights, axis=1), (1, 0), exact=self.exact)
        before = ref.sums[item.head, :, item.queries] * jnp.concatenate(shrink, axis=1)
        ref.sums[item.head, :, item.queries] = before + sums


def _kernel(*refs: Any, names: tuple[str, ...], grid: Grid, exact: bool) -> None:
    ref = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    form, blocks = grid.form, grid.blocks
    step = Step(grid, ref)
    dim, ones = form.value_dim, slice(form.ones_row, form.ones_row + ONES)
    query_turned = form.query_turned(form.head_dim)

    @pl.when(step.is_first)
    def _() -> None:
        ref.sums[...] = jnp.zeros_like(ref.sums)
        ref.maximum[...] = jnp.full_like(ref.maximum, NO_MAXIMUM)
        ref.value_columns[:, ones] = jnp.ones((blocks.kv_heads, ONES, blocks.keys), form.dtype)
        if dim < form.ones_row:
            rest = blocks.kv_heads, form.ones_row - dim, blocks.keys
            ref.value_columns[:, dim : form.ones_row] = jnp.zeros(rest, form.dtype)
        for head in range(blocks.heads):
            query = ref.query[head].T if query_turned else ref.query[head]
            ref.scaled[head] = scaled(query, form)
            if form.sinks:
                sink = ref.sinks[jax.lax.rem(step.head(head), form.heads)] * LOG2_E
                ref.maximum[head] = jnp.full((1, blocks.queries), sink, F32)
                ref.sums[head, ones] = jnp.ones((ONES, blocks.queries), F32)

    step.visit(_Work(step, ref, exact))

    @pl.when(step.is_last)
    def _() -> None:
        def finish(head: Any, carry: Any) -> Any:
            total = ref.sums[head, form.ones_row : form.ones_row + 1]
            # A query that sees no key has a total of 0 and sums of 0.
            some = total > 0
            out = ref.sums[head, :dim] * jnp.where(some, 1 / jnp.where(some, total, 1), 0)
            ref.out[head] = (out if form.query_turned(dim) else out.T).astype(form.dtype)
            logarithm = jnp.log(jnp.where(some, total, 1))
            ref.log_sum[head] = jnp.where(some, ref.maximum[head] / LOG2_E + logarithm, -jnp.inf)
            return carry

        jax.lax.fori_loop(0, blocks.heads, finish, 0)


def factor(form: Form) -> float:
    """Of queries, before their products with keys."""
    return form.scale * LOG2_E if form.softcap is None else form.scale / form.softcap


def scaled(query: jax.Array, form: Form) -> jax.Array:
    """Queries times `factor`: a multiplication for each of them is none for each score."""
    return (query.astype(F32) * factor(form)).astype(form.dtype)


def capped(products: jax.Array, form: Form) -> jax.Array:
    """Products with scaled queries as scores: capped, and times log2(e)."""
    return products if form.softcap is None else jnp.tanh(products) * (form.softcap * LOG2_E)


def call(
    first: jax.Array,
    end: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
    *,
    form: Form,
    blocks: Blocks,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """One `pallas_call`: [B * Hq, L, E], turned if `form.query_turned(E)`, and the log-sum-exp, f32 [B * Hq, 1, L].

    Args:
      first, end: [B, 1, L] int32, each query's run of keys; L padded to whole blocks with 0, 0.
      query: [B * Hq, L, D]. key: [B * H, S, D]. value: [B * H, S, E]. Each turned if `form` says so.
      sinks: [Hq] f32.
    """
    grid = Grid(form, blocks)
    scalars = {"spans": spans(first[:, 0], end[:, 0], blocks)}
    if sinks is not None:
        scalars["sinks"] = sinks
    names = (*scalars, "query", "key", "value", "first", "end", "out", "log_sum")
    scratch = _scratch(form, blocks)
    rows, dim = form.sequences * form.heads, form.value_dim
    shape = (dim, form.queries) if form.query_turned(dim) else (form.queries, dim)
    return pl.pallas_call(
        functools.partial(_kernel, names=(*names, *scratch), grid=grid, exact=interpret is not False),
        name="flash_attention",
        out_shape=(
            jax.ShapeDtypeStruct((rows, *shape), form.dtype),
            jax.ShapeDtypeStruct((rows, 1, form.queries), F32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid.shape,
            in_specs=[
                grid.of_queries(form.head_dim),
                grid.of_keys(form.head_dim),
                grid.of_keys(dim),
                grid.of_runs(),
                grid.of_runs(),
            ],
            out_specs=[grid.of_queries(dim), grid.of_rows()],
            scratch_shapes=list(scratch.values()),
        ),
        compiler_params=compiler_params(blocks, parallel=4),
        cost_estimate=pl.CostEstimate(
            flops=2 * form.pairs * (form.head_dim + dim),
            bytes_accessed=sum(math.prod(x.shape) for x in (query, key, value)) * form.itemsize,
            transcendentals=form.pairs,
        ),
        interpret=interpret,
    )(*scalars.values(), query, key, value, first, end)
