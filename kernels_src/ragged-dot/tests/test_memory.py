"""What the kernels do to memory: races, bounds, uninitialised reads, by Pallas' TPU interpreter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh
from ragged_dot import functions
from ragged_dot.kernel import Config, gmm, gmm_weights

# "padded": reading a tile's padding is what the hardware does; whatever stands there must not matter.
CHECKED = pltpu.InterpretParams(
    detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan", buffer_bounds="padded"
)
V6E = AbstractMesh(
    (), (), abstract_device=AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
)

# rows, K, N, sizes, first group, groups, row tile, column tile: even, straddling, empty, overhanging
SHAPES = {
    "one-tile": (16, 64, 128, [3, 0, 8, 5], 0, 4, 16, 128),
    "straddling": (96, 128, 256, [10, 30, 0, 41], 0, 4, 16, 128),
    "rows-past-groups": (64, 64, 128, [5, 0], 0, 2, 16, 128),
    "no-rows": (32, 64, 128, [0, 0], 0, 2, 16, 128),
    "some-groups": (80, 128, 128, [20, 11, 9, 30], 1, 2, 32, 128),
    "split-k": (48, 384, 128, [20, 0, 15], 0, 3, 16, 128),
    "overhanging": (77, 192, 320, [30, 1, 40], 0, 3, 32, 256),
}


@pytest.fixture(autouse=True)
def _fresh_interpreter():
    yield
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_kernels_are_free_of_memory_errors(shape, dtype):
    m, k, n, sizes, offset, groups, tile_m, tile_n = shape
    rng = np.random.default_rng(0)
    lhs, grad = (jnp.asarray(rng.standard_normal((m, c)), dtype) for c in (k, n))
    weight_config = Config(tile_m, tile_n, 128 if k > 128 else k, 1 << 26)
    # The forward product splits K into equal tiles.
    config = Config(tile_m, tile_n, 128 if k % 128 == 0 else k, 1 << 26)
    where = (jnp.asarray(sizes, jnp.int32), jnp.asarray([offset], jnp.int32))
    with jax.sharding.use_abstract_mesh(V6E):
        for transpose_rhs in (False, True):
            rhs = jnp.asarray(rng.standard_normal((groups, n, k) if transpose_rhs else (groups, k, n)), dtype)
            out = gmm(
                lhs,
                rhs,
                *where,
                transpose_rhs=transpose_rhs,
                out_dtype=dtype,
                config=config,
                interpret=CHECKED,
            )
            expected = oracle.ragged_dot(lhs, rhs, sizes, offset, transpose_rhs=transpose_rhs)
            assert oracle.relative_l2(out, expected) <= oracle.TOLERANCE[dtype]
        weights = gmm_weights(
            lhs, grad, *where, groups=groups, out_dtype=dtype, config=weight_config, interpret=CHECKED
        )
        _, expected = oracle.gradients(lhs, np.zeros((groups, k, n)), grad, sizes, offset)
        assert oracle.relative_l2(weights, expected) <= oracle.TOLERANCE[dtype]
    assert not _races()


def test_chosen_tiles_are_free_of_memory_errors():
    """Through `ragged_dot`, with the tiles that a v6e gets: padded axes and weights as XLA stores them."""
    rng = np.random.default_rng(1)
    lhs = jnp.asarray(rng.standard_normal((45, 100)), jnp.float32)
    rhs = jnp.asarray(rng.standard_normal((3, 300, 100)), jnp.float32)
    with jax.sharding.use_abstract_mesh(V6E):
        out = functions.ragged_dot(
            lhs, rhs, jnp.asarray([20, 0, 21]), transpose_rhs=True, tpu="v6e", interpret=CHECKED
        )
    assert oracle.relative_l2(out, oracle.ragged_dot(lhs, rhs, [20, 0, 21], transpose_rhs=True)) <= 1e-5
    assert not _races()


def _races() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return bool(interpret_pallas_call.races.races_found)
