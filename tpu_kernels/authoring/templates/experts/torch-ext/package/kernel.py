"""The Pallas kernel. Axis letters: T tokens, k experts of a token, E experts, H hidden size, I intermediate size.

The grid walks over the experts, and over slices of the intermediate size of each::

    gate, up [slice, H] ──> silu(x @ gate.T) * (x @ up.T) * weight ──> @ down.T [slice, H] ──> sum [T, H] f32, in VMEM

Every expert's weights are read once, chosen or not: for few tokens of many experts, sort the tokens by expert instead,
as `tpu-kernels/moe-experts` does.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from . import reference
from .gradient import with_gradient_of
from .tiles import Tiles, choose

MOST_TOKENS, MOST_HIDDEN = 64, 4096
# Of the three slices of weights, of which two are in VMEM at a time; and what the kernel may ask for in all.
SLICE_BYTES = 8 << 20
VMEM_BYTES = 48 << 20
LANES = 128


def experts(
    hidden_states: jax.Array,
    top_k_index: jax.Array,
    top_k_weights: jax.Array,
    gate_up_proj: jax.Array,
    down_proj: jax.Array,
    *,
    tpu: str = "v6e",
    interpret: Any = False,
) -> jax.Array:
    """The experts of a mixture-of-experts layer.

    Args:
      hidden_states: [T, H], bf16 or f32; T of up to `MOST_TOKENS`, H of up to `MOST_HIDDEN`.
      top_k_index: [T, k] int32, the experts of each token; an index of E or more counts for none.
      top_k_weights: [T, k], bf16 or f32.
      gate_up_proj: [E, 2I, H], the gates' rows first; the dtype of `hidden_states`.
      down_proj: [E, H, I].
      tpu: generation that the kernel is made for.
      interpret: as in `pallas_call`.

    Returns: [T, H] in the dtype of `hidden_states`. Sums are in f32.
    """

    def kernel(*arrays: jax.Array) -> jax.Array:
        return _of_any_sizes(*arrays, tpu=tpu, interpret=interpret)

    arrays = (hidden_states, top_k_index, top_k_weights, gate_up_proj, down_proj)
    return with_gradient_of(reference.experts, kernel)(*arrays)


def _of_any_sizes(
    x: jax.Array,
    index: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    tpu: str,
    interpret: Any,
) -> jax.Array:
    if x.size == 0 or down.size == 0:
        return jnp.zeros_like(x)
    experts, hidden, inner = down.shape
    share = reference.routing(index, weights.astype(jnp.float32), experts).T[:, :, None]
    # An intermediate size that is no multiple of the lanes is padded, which copies the weights.
    padding = -inner % LANES
    gate_up = jnp.pad(gate_up.reshape(experts, 2, inner, hidden), ((0, 0), (0, 0), (0, padding), (0, 0)))
    down = jnp.pad(down, ((0, 0), (0, 0), (0, padding)))
    inner += padding
    sizes = [size for size in (512, 384, 256, LANES) if inner % size == 0]
    few = [size for size in sizes if 3 * size * hidden * x.dtype.itemsize <= SLICE_BYTES]
    offered = [Tiles(x.shape[0], hidden, size) for size in few or sizes[-1:]]
    arrays = {"x": x, "share": share, "gate_up": gate_up, "down": down}
    dimensions = {"tokens": x.shape[0], "experts": experts, "hidden": hidden, "inner": inner}
    tiles = choose(_experts, arrays, dimensions, offered, tpu)
    return _experts(**arrays, tiles=tiles, interpret=interpret)


def _experts(
    x: jax.Array,
    share: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    tiles: Tiles,
    interpret: Any = False,
) -> jax.Array:
    """[T, H] from tokens [T, H], weights [E, T, 1] and [E, 2, I, H], [E, H, I]."""
    tokens, hidden = x.shape
    experts, _, inner = down.shape
    size = tiles.depth
    whole = pl.BlockSpec((tokens, hidden), lambda e, s: (0, 0))
    return pl.pallas_call(
        _block,
        grid=(experts, inner // size),
        in_specs=[
            whole,
            pl.BlockSpec((None, tokens, 1), lambda e, s: (e, 0, 0)),
            pl.BlockSpec((None, None, size, hidden), lambda e, s: (e, 0, s, 0)),
            pl.BlockSpec((None, None, size, hidden), lambda e, s: (e, 1, s, 0)),
            pl.BlockSpec((None, hidden, size), lambda e, s: (e, 0, s)),
        ],
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((tokens, hidden), x.dtype),
        scratch_shapes=[pltpu.VMEM((tokens, hidden), jnp.float32)],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        cost_estimate=pl.CostEstimate(
            flops=6 * tokens * down.size,
            transcendentals=tokens * experts * inner,
            bytes_accessed=(3 * down.size + 2 * x.size) * x.dtype.itemsize,
        ),
        name="experts",
        interpret=interpret,
    )(x, share, gate_up, gate_up, down)


def _block(
    x_ref: Any, share_ref: Any, gate_ref: Any, up_ref: Any, down_ref: Any, out_ref: Any, sum_ref: Any
) -> None:
    expert, step = pl.program_id(0), pl.program_id(1)

    @pl.when((expert == 0) & (step == 0))
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    precision = jax.lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None
    dot = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    x = x_ref[...]
    inner = jax.nn.silu(dot(x, gate_ref[...])) * dot(x, up_ref[...]) * share_ref[...]
    sum_ref[...] += dot(inner.astype(x.dtype), down_ref[...])

    @pl.when((expert == pl.num_programs(0) - 1) & (step == pl.num_programs(1) - 1))
    def _() -> None:
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)
