"""Attention of many queries, in one Pallas call, with the log-sum-exp that its gradient needs.

Axis letters::

    B  sequences       L  queries      D  head dimension of queries and keys
    Hq query heads     S  keys         E  head dimension of values
    H  kv heads

A step computes a tile, a block of queries of several heads on a block of keys, everything turned: scores are
[keys, queries]. A softmax then reduces over rows, without moving numbers between lanes, and the product with the
values, ``v^T [E, keys] · weights [keys, queries]``, has the weights as the side that stays in the matrix unit: its
whole width is used, where ``weights · v`` would use E columns of it::

    for each head and chunk of keys, two products ahead of the softmax:
        s = k · q^T, scaled, capped, masked where the tile needs it
        new maximum; w = 2 ** (s - maximum)
        sums = 2 ** (old maximum - maximum) * sums + [v^T; 1] · w

The rows of ones behind v^T give the weights' sums by the same product. Values of keys that no query of the block sees
are zeroed, as 0 times NaN is NaN.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .decode_kernel import LOG2_E, MASKED, NO_MAXIMUM
from .flash_tiles import (
    ONES,
    SEEN_END,
    SEEN_FIRST,
    Blocks,
    Form,
    Grid,
    Step,
    columns_of,
    compiler_params,
    dot,
    pipelined,
    spans,
    step_bytes,
)

F32 = jnp.float32


def _scratch(form: Form, blocks: Blocks) -> dict[str, Any]:
    rows = form.ones_row + ONES
    return {
        "maximum": pltpu.VMEM((blocks.heads, 1, blocks.queries), F32),
        "sums": pltpu.VMEM((blocks.heads, rows, blocks.queries), F32),
        "key_rows": pltpu.VMEM((blocks.kv_heads, blocks.keys, form.head_dim), form.dtype),
        "value_columns": pltpu.VMEM((blocks.kv_heads, rows, blocks.keys), form.dtype),
    }


def vmem_bytes(form: Form, blocks: Blocks) -> int:
    """Vector memory that the kernel takes."""
    sums = blocks.heads * (form.ones_row + ONES + 8) * blocks.queries * 4
    copies = blocks.kv_heads * blocks.keys * (form.head_dim + 127 + form.ones_row + ONES) * form.itemsize
    return step_bytes(form, blocks, tiles=6) + sums + copies


def _kernel(*refs: Any, names: tuple[str, ...], grid: Grid, exact: bool) -> None:
    ref = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    form, blocks = grid.form, grid.blocks
    step = Step(grid, ref)
    dim, ones = form.value_dim, slice(form.ones_row, form.ones_row + ONES)
    key_turned, value_turned = form.key_turned(form.head_dim), form.key_turned(dim)
    query_turned = form.query_turned(form.head_dim)

    @pl.when(step.is_first)
    def _() -> None:
        ref.sums[...] = jnp.zeros_like(ref.sums)
        ref.maximum[...] = jnp.full_like(ref.maximum, NO_MAXIMUM)
        ref.value_columns[:, ones] = jnp.ones((blocks.kv_heads, ONES, blocks.keys), form.dtype)
        if dim < form.ones_row:
            rest = blocks.kv_heads, form.ones_row - dim, blocks.keys
            ref.value_columns[:, dim : form.ones_row] = jnp.zeros(rest, form.dtype)
        if form.sinks:
            for head in range(blocks.heads):
                sink = ref.sinks[jax.lax.rem(step.head(head), form.heads)] * LOG2_E
                ref.maximum[head] = jnp.full((1, blocks.queries), sink, F32)
                ref.sums[head, ones] = jnp.ones((ONES, blocks.queries), F32)

    def compute(masked: bool) -> None:
        for head in range(blocks.kv_heads):
            value = ref.value[head] if value_turned else ref.value[head].T
            if masked:
                key = step.key_places(0, value.shape, 1)
                seen = (key >= step.span(SEEN_FIRST)) & (key < step.span(SEEN_END))
                value = jnp.where(seen, value, jnp.zeros_like(value))
            ref.value_columns[head, :dim] = value
            if key_turned:
                ref.key_rows[head] = ref.key[head].T
        keys = ref.key_rows if key_turned else ref.key

        def scores(head: int, kv_head: int, chunk: int) -> jax.Array:
            key = keys[kv_head, pl.ds(chunk * blocks.chunk, blocks.chunk)]
            return dot(key, ref.query[head], (1, 0 if query_turned else 1), exact=exact)

        def fold(head: int, kv_head: int, chunk: int, products: jax.Array) -> None:
            weights, shrink = [], []
            for columns in columns_of(blocks.queries):
                x = capped(products[:, columns], form)
                if masked:
                    x = jnp.where(step.visible(chunk, columns), x, MASKED)
                before = ref.maximum[head, :, columns]
                maximum = jnp.maximum(before, jnp.max(x, axis=0, keepdims=True))
                ref.maximum[head, :, columns] = maximum
                weights.append(jnp.exp2(x - maximum).astype(form.dtype))
                shrink.append(jnp.exp2(before - maximum))
            value = ref.value_columns[kv_head, :, pl.ds(chunk * blocks.chunk, blocks.chunk)]
            sums = dot(value, jnp.concatenate(weights, axis=1), (1, 0), exact=exact)
            ref.sums[head] = ref.sums[head] * jnp.concatenate(shrink, axis=1) + sums

        pipelined(step.items(), scores, fold)

    step.visit(compute)

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


def capped(products: jax.Array, form: Form) -> jax.Array:
    """Products as scores: scaled, capped, and times log2(e)."""
    if form.softcap is None:
        return products * (form.scale * LOG2_E)
    return jnp.tanh(products * (form.scale / form.softcap)) * (form.softcap * LOG2_E)


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
