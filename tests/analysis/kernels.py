"""Small kernels, each with one trait."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

MIB = 1024 * 1024


def shape(*dims, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, dtype)


def twice(x):
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, out_shape=shape(*x.shape, dtype=x.dtype), name="twice")(x)


def twice_elsewhere(x):
    """`twice`, from other lines."""

    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, out_shape=shape(*x.shape, dtype=x.dtype), name="twice")(x)


twice_elsewhere.__name__ = "twice"


def generation(x):
    """Has one row for each generation number of the TPU that it is traced for."""

    def kernel(x_ref, out_ref):
        out_ref[...] = jnp.zeros_like(out_ref)

    rows = 8 * pltpu.get_tpu_info().generation
    return pl.pallas_call(kernel, out_shape=shape(rows, 128), name="generation")(x)


def blocks(x, *, rows=1024, limit=8 * MIB):
    """Two buffers of two blocks of f32[rows, 1024]."""

    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        grid=(x.shape[0] // rows,),
        in_specs=[spec],
        out_specs=spec,
        out_shape=shape(*x.shape),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=limit),
        cost_estimate=pl.CostEstimate(flops=x.size, bytes_accessed=8 * x.size, transcendentals=0),
        name="blocks",
    )(x)


def row_major_weights(weights):
    """Reads a part of weights that it wants in the order they are written in."""

    def kernel(weights_ref, out_ref, buffer, semaphore):
        copy = pltpu.make_async_copy(weights_ref.at[0, pl.ds(0, 128)], buffer, semaphore)
        copy.start()
        copy.wait()
        out_ref[...] = buffer[...]

    part = (128, weights.shape[2])
    return pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_shape=shape(*part, dtype=weights.dtype),
        scratch_shapes=[pltpu.VMEM(part, weights.dtype), pltpu.SemaphoreType.DMA],
        name="row_major_weights",
    )(weights)


def misaligned(start, x):
    """Mosaic refuses it."""

    def kernel(start_ref, x_ref, out_ref):
        out_ref[...] = x_ref[:, pl.ds(start_ref[0] * 3, 128)]

    return pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec()],
        out_shape=shape(8, 128),
        name="misaligned",
    )(start, x)


def sorting(x):
    """Pallas refuses it."""

    def kernel(x_ref, out_ref):
        out_ref[...] = jnp.sort(x_ref[...], axis=0)

    return pl.pallas_call(kernel, out_shape=shape(*x.shape), name="sorting")(x)
