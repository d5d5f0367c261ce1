import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from torch_tpu._internal.pallas import jax_op

from ._ops import add_op_namespace_prefix


def _kernel(bounds, lhs, rhs, out):
    group = pl.program_id(0)

    @pl.when(group == 0)
    def _():
        out[...] = jnp.zeros_like(out)

    row = jax.lax.broadcasted_iota(jnp.int32, out.shape, 0)
    inside = (bounds[group] <= row) & (row < bounds[group + 1])
    product = jax.lax.dot_general(
        lhs[...], rhs[0], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    out[...] = jnp.where(inside, product.astype(out.dtype), out[...])


def grouped(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """lhs [M, K], its rows in groups one after the other; rhs [G, N, K]; group_sizes int32 [G]; gives [M, N]."""
    m, k = lhs.shape
    groups, n, _ = rhs.shape
    bounds = jnp.pad(jnp.cumsum(group_sizes, dtype=jnp.int32), (1, 0))
    return pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), lhs.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(groups,),
            in_specs=[
                pl.BlockSpec((m, k), lambda group, _: (0, 0)),
                pl.BlockSpec((1, n, k), lambda group, _: (group, 0, 0)),
            ],
            out_specs=pl.BlockSpec((m, n), lambda group, _: (0, 0)),
        ),
    )(bounds, lhs, rhs)


@jax_op(add_op_namespace_prefix("ragged_dot"))
def ragged_dot(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return grouped(lhs, rhs, group_sizes)
