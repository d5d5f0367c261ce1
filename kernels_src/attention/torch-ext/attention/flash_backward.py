"""The gradient of `flash_forward`, fused: dq, dk and dv from one walk over the tiles.

Turned as there, with p the weights [keys, queries] and do the gradient of the result::

    p  = 2 ** (k · q^T - log-sum-exp)         ds = p * (v · do^T - delta)
    dv^T += do^T · p^T      dk^T += q^T · ds^T      dq^T += k^T · ds

delta is each query's sum of do * out. dk and dv of a kv head are kept in vector memory, f32, while all of its query
heads and their blocks pass; dq of a block while its tiles of keys do. Where so many keys have no room, `flash` gives
them piece by piece.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .decode_kernel import LOG2_E
from .flash_forward import F32, capped
from .flash_tiles import (
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
from .shapes import LANES, round_up


def _scratch(form: Form, grid: Grid) -> dict[str, Any]:
    blocks, dim, value_dim = grid.blocks, form.head_dim, form.value_dim
    of_keys = grid.key_tiles, blocks.kv_heads
    return {
        "query_columns": pltpu.VMEM((blocks.heads, dim, blocks.queries), form.dtype),
        "grad_columns": pltpu.VMEM((blocks.heads, value_dim, blocks.queries), form.dtype),
        "key_columns": pltpu.VMEM((blocks.kv_heads, dim, blocks.keys), form.dtype),
        "key_rows": pltpu.VMEM((blocks.kv_heads, blocks.keys, dim), form.dtype),
        "value_rows": pltpu.VMEM((blocks.kv_heads, blocks.keys, value_dim), form.dtype),
        "query_sums": pltpu.VMEM((blocks.heads, dim, blocks.queries), F32),
        "key_sums": pltpu.VMEM((*of_keys, dim, blocks.keys), F32),
        "value_sums": pltpu.VMEM((*of_keys, value_dim, blocks.keys), F32),
    }


def vmem_bytes(form: Form, blocks: Blocks) -> int:
    """Vector memory that the kernel takes."""
    dims = form.head_dim + form.value_dim
    padded = round_up(form.head_dim, LANES) + round_up(form.value_dim, LANES)
    of_query = blocks.heads * blocks.queries * (dims * form.itemsize + form.head_dim * (4 + 2 * 4))
    keys = blocks.kv_heads * round_up(form.keys, blocks.keys)
    tile = blocks.kv_heads * blocks.keys * 2 * padded * form.itemsize
    return (
        step_bytes(form, blocks, tiles=12) + of_query + tile + keys * (dims * 4 + 2 * padded * form.itemsize)
    )


def _kernel(*refs: Any, names: tuple[str, ...], grid: Grid, exact: bool) -> None:
    ref = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    form, blocks = grid.form, grid.blocks
    step = Step(grid, ref)
    query_turned, grad_turned = form.query_turned(form.head_dim), form.query_turned(form.value_dim)
    key_turned, value_turned = form.key_turned(form.head_dim), form.key_turned(form.value_dim)
    of_sequence = (
        (step.part == 0) & (step.block == 0),
        ((step.part == grid.parts - 1) & (step.block == grid.query_blocks - 1)),
    )

    @pl.when(step.is_first & of_sequence[0])
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
            ref.query_columns[head] = columns(ref.query[head] if query_turned else ref.query[head].T)
            ref.grad_columns[head] = columns(ref.grad[head] if grad_turned else ref.grad[head].T)
            return carry

        jax.lax.fori_loop(0, blocks.heads, turn, 0)

    def compute(masked: bool) -> None:
        for head in range(blocks.kv_heads):
            key = ref.key[head] if key_turned else ref.key[head].T
            if masked:
                place = step.key_places(0, key.shape, 1)
                seen = (place >= step.span(SEEN_FIRST)) & (place < step.span(SEEN_END))
                key = jnp.where(seen, key, jnp.zeros_like(key))
            ref.key_columns[head] = key
            if key_turned:
                ref.key_rows[head] = ref.key[head].T
            if value_turned:
                ref.value_rows[head] = ref.value[head].T
        keys = ref.key_rows if key_turned else ref.key
        values = ref.value_rows if value_turned else ref.value
        sums: dict[tuple[int, int], tuple[jax.Array, jax.Array]] = {}
        last_of_kv_head = blocks.heads // blocks.kv_heads - 1

        def products(head: int, kv_head: int, chunk: int) -> tuple[jax.Array, jax.Array]:
            there = pl.ds(chunk * blocks.chunk, blocks.chunk)
            return (
                dot(keys[kv_head, there], ref.query_columns[head], (1, 0), exact=exact),
                dot(values[kv_head, there], ref.grad_columns[head], (1, 0), exact=exact),
            )

        def fold(head: int, kv_head: int, chunk: int, made: tuple[jax.Array, jax.Array]) -> None:
            weights, grads = [], []
            for columns in columns_of(blocks.queries):
                score = capped(made[0][:, columns], form)
                weight = jnp.exp2(score - ref.log_sum[head, :, columns] * LOG2_E)
                grad = weight * (made[1][:, columns] - ref.delta[head, :, columns])
                if form.softcap is not None:
                    grad = grad * (1 - jnp.square(score * (1 / (form.softcap * LOG2_E))))
                if masked:
                    visible = step.visible(chunk, columns)
                    weight, grad = jnp.where(visible, weight, 0), jnp.where(visible, grad, 0)
                weights.append(weight.astype(form.dtype))
                grads.append(grad.astype(form.dtype))
            weight, grad = jnp.concatenate(weights, axis=1), jnp.concatenate(grads, axis=1)
            there = pl.ds(chunk * blocks.chunk, blocks.chunk)
            of_key = dot(ref.query_columns[head], grad, (1, 1), exact=exact)
            of_value = dot(ref.grad_columns[head], weight, (1, 1), exact=exact)
            before = sums.get((kv_head, chunk))
            if before is not None:
                of_key, of_value = before[0] + of_key, before[1] + of_value
            sums[kv_head, chunk] = of_key, of_value
            ref.query_sums[head] += dot(ref.key_columns[kv_head, :, there], grad, (1, 0), exact=exact)
            if head % (last_of_kv_head + 1) == last_of_kv_head:
                ref.key_sums[step.tile, kv_head, :, there] += of_key
                ref.value_sums[step.tile, kv_head, :, there] += of_value

        pipelined(step.items(), products, fold, ahead=1)

    step.visit(compute)

    @pl.when(step.is_last)
    def _() -> None:
        def finish(head: Any, carry: Any) -> Any:
            out = ref.query_sums[head] * form.scale
            ref.query_grad[head] = (out if query_turned else out.T).astype(ref.query_grad.dtype)
            return carry

        jax.lax.fori_loop(0, blocks.heads, finish, 0)

    @pl.when(step.is_last & of_sequence[1])
    def _() -> None:
        def finish(tile: Any, carry: Any) -> Any:
            there = pl.ds(pl.multiple_of(tile * blocks.keys, blocks.keys), blocks.keys)
            for head in range(blocks.kv_heads):
                key, value = ref.key_sums[tile, head] * form.scale, ref.value_sums[tile, head]
                for out, grad, turned in (
                    (ref.key_grad, key, key_turned),
                    (ref.value_grad, value, value_turned),
                ):
                    if turned:
                        out[head, :, there] = grad.astype(form.dtype)
                    else:
                        out[head, there] = grad.T.astype(form.dtype)
            return carry

        jax.lax.fori_loop(0, grid.key_tiles, finish, 0)


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
        keys = grid.key_tiles * blocks.keys
        shape = (dim, keys) if form.key_turned(dim) else (keys, dim)
        return pl.BlockSpec((blocks.kv_heads, *shape), lambda b, h, *_: (b * grid.shape[1] + h, 0, 0))

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
