"""The gradient of `flash_forward`, fused: dq, dk and dv from one walk over the tiles.

Turned as there, with p the weights [keys, queries] and do the gradient of the result::

    p  = 2 ** (k · q^T - log-sum-exp)         ds = p * (v · do^T - delta)
    dv^T += do^T · p^T      dk^T += q^T · ds^T      dq^T += k^T · ds

delta is each query's sum of do * out. dk and dv of a kv head are kept in vector memory, f32, while all of its query
heads and their blocks pass; dq of a block while its tiles of keys do. Where so many keys have no room, `flash` gives
them piece by piece.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .decode_kernel import LOG2_E
from .flash_forward import F32, capped, factor, scaled
from .flash_steps import Item, Step, Tile, ahead_scratch
from .flash_tiles import (
    Blocks,
    Form,
    Grid,
    compiler_params,
    dot,
    spans,
    step_bytes,
)
from .shapes import LANES, round_up

# Pairs of products that are made ahead of their use.
AHEAD = 2


def _scratch(form: Form, grid: Grid) -> dict[str, Any]:
    blocks, dim, value_dim = grid.blocks, form.head_dim, form.value_dim
    scratch = {
        "ahead": ahead_scratch(blocks, AHEAD, products=2),
        "query_columns": pltpu.VMEM((blocks.heads, dim, blocks.queries), form.dtype),
        "grad_columns": pltpu.VMEM((blocks.heads, value_dim, blocks.queries), form.dtype),
        "key_columns": pltpu.VMEM((blocks.kv_heads, dim, blocks.keys), form.dtype),
        "query_sums": pltpu.VMEM((blocks.heads, dim, blocks.queries), F32),
        "key_sums": pltpu.VMEM((blocks.kv_heads, dim, grid.keys), F32),
        "value_sums": pltpu.VMEM((blocks.kv_heads, value_dim, grid.keys), F32),
        "visible": pltpu.VMEM((blocks.chunk, blocks.queries), jnp.int32),
    }
    for name, length in (("key_rows", dim), ("value_rows", value_dim)):
        if form.key_turned(length):
            scratch[name] = pltpu.VMEM((2, blocks.kv_heads, blocks.keys, length), form.dtype)
    return scratch


def vmem_bytes(form: Form, blocks: Blocks) -> int:
    """Vector memory that the kernel takes."""
    dims = form.head_dim + form.value_dim
    padded = round_up(form.head_dim, LANES) + round_up(form.value_dim, LANES)
    of_query = blocks.heads * blocks.queries * (dims * form.itemsize + form.head_dim * (4 + 2 * 4))
    keys = blocks.kv_heads * round_up(form.keys, blocks.held)
    tile = blocks.kv_heads * blocks.keys * 3 * padded * form.itemsize
    sums = keys * (dims * 4 + padded * form.itemsize)
    return step_bytes(form, blocks, products=4 * AHEAD + 8) + of_query + tile + sums


@dataclasses.dataclass(frozen=True)
class _Work:
    """What is done with a tile."""

    step: Step
    ref: Any
    exact: bool
    ahead: int = AHEAD

    def prepare(self, tile: Tile) -> None:
        self.step.turn_rows(tile)

    def produce(self, tile: Tile, item: Item) -> tuple[jax.Array, jax.Array]:
        query = self.ref.query_columns[item.head, :, item.queries]
        grad = self.ref.grad_columns[item.head, :, item.queries]
        return (
            dot(self.step.rows("key", tile, item), query, (1, 0), exact=self.exact),
            dot(self.step.rows("value", tile, item), grad, (1, 0), exact=self.exact),
        )

    def enter(self, tile: Tile) -> None:
        ref, step = self.ref, self.step
        turned = "key_rows" in vars(ref)
        for head in range(ref.key.shape[0]):
            key = ref.key[head, :, tile.held] if turned else ref.key[head, tile.held].T
            if tile.masked:
                key = jnp.where(step.seen(tile, key.shape, 1), key, jnp.zeros_like(key))
            ref.key_columns[head, :, : tile.keys] = key
        if tile.masked:
            step.mark_visible(tile)

    def fold(self, tile: Tile, item: Item, *products: jax.Array) -> None:
        ref, form = self.ref, self.step.grid.form
        weights, grads = [], []
        for local, columns in item.strips():
            score = capped(products[0][:, local], form)
            weight = jnp.exp2(score - ref.log_sum[item.head, :, columns] * LOG2_E)
            grad = weight * (products[1][:, local] - ref.delta[item.head, :, columns])
            if form.softcap is not None:
                grad = grad * (1 - jnp.square(score * (1 / (form.softcap * LOG2_E))))
            if tile.masked:
                visible = ref.visible[:, columns] > 0
                weight, grad = jnp.where(visible, weight, 0), jnp.where(visible, grad, 0)
            weights.append(weight.astype(form.dtype))
            grads.append(grad.astype(form.dtype))
        weight, grad = jnp.concatenate(weights, axis=1), jnp.concatenate(grads, axis=1)
        size = item.keys.stop - item.keys.start
        begin = pl.multiple_of(tile.key + item.keys.start, LANES)
        sums = (
            (ref.key_sums, ref.query_columns, grad),
            (ref.value_sums, ref.grad_columns, weight),
        )
        for total, columns, side in sums:
            there = item.kv_head, slice(None), pl.ds(begin, size)
            total[there] += dot(columns[item.head, :, item.queries], side, (1, 1), exact=self.exact)
        of_query = dot(ref.key_columns[item.kv_head, :, item.keys], grad, (1, 0), exact=self.exact)
        ref.query_sums[item.head, :, item.queries] += of_query


def _kernel(*refs: Any, names: tuple[str, ...], grid: Grid, exact: bool) -> None:
    ref = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    form, blocks = grid.form, grid.blocks
    step = Step(grid, ref)
    query_turned, grad_turned = form.query_turned(form.head_dim), form.query_turned(form.value_dim)
    first_of_sequence = (step.part == 0) & (step.block == 0)
    last_of_sequence = (step.part == grid.parts - 1) & (step.block == grid.query_blocks - 1)

    @pl.when(step.is_first & first_of_sequence)
    def _() -> None:
        ref.key_sums[...] = jnp.zeros_like(ref.key_sums)
        ref.value_sums[...] = jnp.zeros_like(ref.value_sums)

    @pl.when(step.is_first)
    def _() -> None:
        ref.query_sums[...] = jnp.zeros_like(ref.query_sums)

        def columns(x: jax.Array) -> jax.Array:
            if form.queries % blocks.queries == 0:
                return x
            # What lies behind the last query may be NaN.
            query = step.block * blocks.queries + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
            return jnp.where(query < form.queries, x, jnp.zeros_like(x))

        def turn(head: Any, carry: Any) -> Any:
            query = columns(ref.query[head] if query_turned else ref.query[head].T)
            ref.query_columns[head] = scaled(query, form)
            ref.grad_columns[head] = columns(ref.grad[head] if grad_turned else ref.grad[head].T)
            return carry

        jax.lax.fori_loop(0, blocks.heads, turn, 0)

    step.visit(_Work(step, ref, exact))

    @pl.when(step.is_last)
    def _() -> None:
        def finish(head: Any, carry: Any) -> Any:
            out = ref.query_sums[head] * form.scale
            ref.query_grad[head] = (out if query_turned else out.T).astype(ref.query_grad.dtype)
            return carry

        jax.lax.fori_loop(0, blocks.heads, finish, 0)

    @pl.when(step.is_last & last_of_sequence)
    def _() -> None:
        def finish(chunk: Any, carry: Any) -> Any:
            there = pl.ds(pl.multiple_of(chunk * blocks.chunk, blocks.chunk), blocks.chunk)
            for head in range(blocks.kv_heads):
                # The queries in these sums are scaled ones.
                key = ref.key_sums[head, :, there] * (form.scale / factor(form))
                for out, grad, length in (
                    (ref.key_grad, key, form.head_dim),
                    (ref.value_grad, ref.value_sums[head, :, there], form.value_dim),
                ):
                    if form.key_turned(length):
                        out[head, :, there] = grad.astype(form.dtype)
                    else:
                        out[head, there] = grad.T.astype(form.dtype)
            return carry

        jax.lax.fori_loop(0, grid.keys // blocks.chunk, finish, 0)


def call(
    first: jax.Array,
    end: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    grad: jax.Array,
    log_sum: jax.Array,
    delta: jax.Array,
    *,
    form: Form,
    blocks: Blocks,
    query_grad_dtype: Any,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One `pallas_call`: the gradients of query, key and value, as these are laid out.

    Args:
      first, end, query, key, value: as for `flash_forward.call`.
      grad: [B * Hq, L, E], of the result; turned if `form` says so.
      log_sum, delta: [B * Hq, 1, L] f32.
    """
    grid = Grid(form, blocks)
    scratch = _scratch(form, grid)
    names = ("spans", "query", "key", "value", "grad", "log_sum", "delta", "first", "end")
    names += ("query_grad", "key_grad", "value_grad")

    def whole(dim: int) -> pl.BlockSpec:
        """All keys of a step's kv heads."""
        shape = (dim, grid.keys) if form.key_turned(dim) else (grid.keys, dim)
        return pl.BlockSpec(
            (blocks.kv_heads, *shape),
            lambda b, h, *_: (b * grid.shape[1] + h, 0, 0),
            # Written once for all queries: a second buffer would hide nothing that counts.
            pipeline_mode=pl.Buffered(1),
        )

    return pl.pallas_call(
        functools.partial(_kernel, names=(*names, *scratch), grid=grid, exact=interpret is not False),
        name="flash_attention_gradient",
        out_shape=(
            jax.ShapeDtypeStruct(query.shape, query_grad_dtype),
            jax.ShapeDtypeStruct(key.shape, form.dtype),
            jax.ShapeDtypeStruct(value.shape, form.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid.shape,
            in_specs=[
                grid.of_queries(form.head_dim),
                grid.of_keys(form.head_dim),
                grid.of_keys(form.value_dim),
                grid.of_queries(form.value_dim),
                grid.of_rows(),
                grid.of_rows(),
                grid.of_runs(),
                grid.of_runs(),
            ],
            out_specs=[grid.of_queries(form.head_dim), whole(form.head_dim), whole(form.value_dim)],
            scratch_shapes=list(scratch.values()),
        ),
        compiler_params=compiler_params(blocks, parallel=2),
        cost_estimate=pl.CostEstimate(
            flops=2 * form.pairs * (3 * form.head_dim + 2 * form.value_dim),
            bytes_accessed=2 * (query.size + key.size + value.size) * form.itemsize,
            transcendentals=form.pairs,
        ),
        interpret=interpret,
    )(spans(first[:, 0], end[:, 0], blocks), query, key, value, grad, log_sum, delta, first, end)
