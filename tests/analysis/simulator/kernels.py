"""Kernels of known traffic."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def shape(*dims, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, dtype)


def matmul(lhs, rhs, *, rows, columns):
    """Each block of lhs is read once; each of rhs once for all of its uses by a row block."""

    def kernel(lhs_ref, rhs_ref, out_ref):
        out_ref[...] = jnp.dot(lhs_ref[...], rhs_ref[...], preferred_element_type=jnp.float32).astype(
            out_ref.dtype
        )

    (m, k), n = lhs.shape, rhs.shape[1]
    return pl.pallas_call(
        kernel,
        grid=(m // rows, n // columns),
        in_specs=[
            pl.BlockSpec((rows, k), lambda i, j: (i, 0)),
            pl.BlockSpec((k, columns), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda i, j: (i, j)),
        out_shape=shape(m, n, dtype=lhs.dtype),
        name="matmul",
    )(lhs, rhs)


def doubled(x, *, rows=256):
    """Reads and writes each block once."""

    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        grid=(x.shape[0] // rows,),
        in_specs=[spec],
        out_specs=spec,
        out_shape=shape(*x.shape, dtype=x.dtype),
        name="doubled",
    )(x)


def _fetch(table, pages, out, buffer, semaphore):
    """Fetches as many pages as each row of the table says."""

    def page(index, _):
        copy = pltpu.make_async_copy(pages.at[index], buffer, semaphore)
        copy.start()
        copy.wait()
        out[...] += buffer[...]

    row = pl.program_id(0)
    out[...] = jnp.zeros_like(out)
    jax.lax.fori_loop(0, table[row, table.shape[1] - 1].astype(jnp.int32), page, None)


def fetched(table, pages):
    """One fetch of a page for each that the last column of the table counts."""
    page = pages.shape[1:]
    return pl.pallas_call(
        _fetch,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(table.shape[0],),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(page, lambda i, table: (0, 0)),
            scratch_shapes=[pltpu.VMEM(page, pages.dtype), pltpu.SemaphoreType.DMA],
        ),
        out_shape=shape(*page, dtype=pages.dtype),
        name="fetched",
    )(table, pages)


def fetched_by_bytes(counts, pages):
    """One fetch of a page for each that the narrow integers count."""

    def kernel(counts, pages, out, buffer, semaphore):
        def page(index, _):
            copy = pltpu.make_async_copy(pages.at[index], buffer, semaphore)
            copy.start()
            copy.wait()
            out[...] += buffer[...]

        out[...] = jnp.zeros_like(out)
        jax.lax.fori_loop(0, counts[pl.program_id(0)].astype(jnp.int32), page, None)

    page = pages.shape[1:]
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(counts.shape[0],),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(page, lambda i, counts: (0, 0)),
            scratch_shapes=[pltpu.VMEM(page, pages.dtype), pltpu.SemaphoreType.DMA],
        ),
        out_shape=shape(*page, dtype=pages.dtype),
        name="fetched_by_bytes",
    )(counts, pages)


def fetched_by_counts(counts, pages):
    """`fetched`, with a table that XLA makes."""
    return fetched(jnp.cumsum(counts)[:, None], pages)


def doubled_in_a_loop(counts, x, *, steps):
    """Calls `fetched` on other integers in each step, and `doubled` once."""

    def step(carry, count):
        return carry + fetched(count[None, None], x)[0, 0], None

    total, _ = jax.lax.scan(step, jnp.float32(0), counts[:steps])
    return doubled(x[0] + total, rows=x.shape[1])


def where_large(x):
    """Branches on what the vector unit finds."""

    def kernel(x_ref, out_ref):
        @pl.when(jnp.max(x_ref[...]) > 3.0)
        def _():
            out_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, out_shape=shape(*x.shape), name="where_large")(x)


def stuck(x):
    """Waits for a copy that it does not start."""

    def kernel(x_ref, out_ref, semaphore):
        pltpu.make_async_copy(x_ref, out_ref, semaphore).wait()

    return pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=shape(*x.shape),
        scratch_shapes=[pltpu.SemaphoreType.DMA],
        name="stuck",
    )(x)


def fetched_by_own_counts(table, pages, *, looped=False):
    """Fetches, for each of the first 4 numbers, as many pages as the table has of it; vector unit counts them."""

    def kernel(table, pages, out, ids, counted, counts, buffer, semaphore):
        def copy(source, target):
            moved = pltpu.make_async_copy(source, target, semaphore)
            moved.start()
            moved.wait()

        copy(table, ids)
        number = jax.lax.broadcasted_iota(jnp.int32, counted.shape, 1)
        same = jnp.where(ids[...] == number, 1.0, 0.0)
        counted[...] = jnp.sum(same, axis=0, keepdims=True).astype(jnp.int32)
        if looped:
            jax.lax.fori_loop(0, 2, lambda _, none: copy(counted, counts), None)
        else:
            copy(counted, counts)
        out[...] = jnp.zeros_like(out)

        def page(index, _):
            copy(pages.at[index], buffer)
            out[...] += buffer[...]

        for each in range(4):
            jax.lax.fori_loop(0, counts[0, each], page, None)

    page = pages.shape[1:]
    return pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
        out_shape=shape(*page, dtype=pages.dtype),
        scratch_shapes=[
            pltpu.VMEM(table.shape, jnp.int32),
            pltpu.VMEM((1, 128), jnp.int32),
            pltpu.SMEM((1, 128), jnp.int32),
            pltpu.VMEM(page, pages.dtype),
            pltpu.SemaphoreType.DMA,
        ],
        name="fetched_by_own_counts",
    )(table, pages)


def matmul_by_cores(lhs, rhs, *, rows, parallel):
    """Each of two halves of the rows is multiplied by itself, on a core of its own where there are two."""

    def kernel(lhs_ref, rhs_ref, out_ref):
        out_ref[...] = jnp.dot(lhs_ref[...], rhs_ref[...], preferred_element_type=jnp.float32).astype(
            out_ref.dtype
        )

    (m, k), n = lhs.shape, rhs.shape[1]
    steps = m // rows // 2
    block = functools.partial(pl.BlockSpec, index_map=lambda half, i: (half * steps + i, 0))
    return pl.pallas_call(
        kernel,
        grid=(2, steps),
        in_specs=[block((rows, k)), pl.BlockSpec((k, n), lambda half, i: (0, 0))],
        out_specs=block((rows, n)),
        out_shape=shape(m, n, dtype=lhs.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel" if parallel else "arbitrary", "arbitrary")
        ),
        name="matmul_by_cores",
    )(lhs, rhs)
