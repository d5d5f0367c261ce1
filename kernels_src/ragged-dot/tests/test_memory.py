"""What the kernels do to memory: races, bounds, uninitialised reads, by Pallas' TPU interpreter."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh
from ragged_dot import functions
from ragged_dot.epilogue import Epilogue
from ragged_dot.forward import gmm
from ragged_dot.quantised import dequantise, pack_mxfp4
from ragged_dot.tiles import Config, WeightConfig
from ragged_dot.weight_gradient import gmm_weights

# "padded": reading a tile's padding is what the hardware does; whatever stands there must not matter.
CHECKED = pltpu.InterpretParams(
    detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan", buffer_bounds="padded"
)
TWO_CORES = dataclasses.replace(CHECKED, num_cores_or_threads=2)
V6E = AbstractMesh(
    (), (), abstract_device=AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
)

# rows, K, N, sizes, first group, groups: even, straddling, empty; a last piece that is shorter
SHAPES = {
    "one-tile": (16, 128, 128, [3, 0, 8, 5], 0, 4),
    "straddling": (96, 128, 320, [10, 30, 0, 41], 0, 4),
    "many-in-a-tile": (96, 128, 128, [1, 2, 0, 3, 1, 60], 0, 6),
    "no-rows": (32, 128, 128, [0, 0], 0, 2),
    "some-groups": (80, 128, 128, [20, 11, 9, 30], 1, 2),
    "split-k": (48, 384, 256, [20, 0, 15], 0, 3),
}
# Few rows; many, with weights shared by a group's chunks; many, with a stream of weights.
RINGS = {"resident": (True, True, 7), "by-group": (False, True, 7), "stream": (False, False, 2)}


@pytest.fixture(autouse=True)
def _fresh_interpreter():
    yield
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ring", RINGS.values(), ids=RINGS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_product_is_free_of_memory_errors(shape, ring, dtype):
    m, k, n, sizes, offset, groups = shape
    resident, by_group, slots = ring
    transpose_rhs = dtype == "float32"
    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.standard_normal((m, k)), dtype)
    rhs = jnp.asarray(rng.standard_normal((groups, n, k) if transpose_rhs else (groups, k, n)), dtype)
    columns = 128 if transpose_rhs or n % 128 == 0 else n
    config = Config(32, columns, 128, slots, 1 if resident else 3, by_group, resident, 1 << 26)
    with jax.sharding.use_abstract_mesh(V6E):
        out = gmm(
            lhs,
            rhs,
            jnp.asarray(sizes, jnp.int32),
            jnp.asarray([offset], jnp.int32),
            transpose_rhs=transpose_rhs,
            out_dtype=dtype,
            config=config,
            interpret=CHECKED,
        )
        expected = oracle.ragged_dot(lhs, rhs, sizes, offset, transpose_rhs=transpose_rhs)
    assert oracle.relative_l2(out, expected) <= oracle.TOLERANCE[dtype]
    assert not _races()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_weight_gradient_is_free_of_memory_errors(shape, dtype):
    m, k, n, sizes, offset, groups = shape
    rng = np.random.default_rng(0)
    lhs, grad = (jnp.asarray(rng.standard_normal((m, c)), dtype) for c in (k, n))
    # Two passes and a shorter last piece, where the axes are long enough.
    config = WeightConfig(32, 16, k, 128 if n % 128 == 0 else n, 256 if k > 256 else k, 2, 2, 1 << 26)
    with jax.sharding.use_abstract_mesh(V6E):
        out = gmm_weights(
            lhs,
            grad,
            jnp.asarray(sizes, jnp.int32),
            jnp.asarray([offset], jnp.int32),
            groups=groups,
            out_dtype=dtype,
            config=config,
            interpret=CHECKED,
        )
        _, expected = oracle.gradients(lhs, np.zeros((groups, k, n)), grad, sizes, offset)
    assert oracle.relative_l2(out, expected) <= oracle.TOLERANCE[dtype]
    assert not _races()


def test_two_cores_each_make_their_columns_of_a_weight_gradient():
    m, k, n, sizes, offset, groups = 96, 128, 512, [10, 30, 0, 41], 0, 4
    rng = np.random.default_rng(0)
    lhs, grad = (jnp.asarray(rng.standard_normal((m, c)), jnp.float32) for c in (k, n))
    with jax.sharding.use_abstract_mesh(V6E):
        out = gmm_weights(
            lhs,
            grad,
            jnp.asarray(sizes, jnp.int32),
            jnp.asarray([offset], jnp.int32),
            groups=groups,
            out_dtype=lhs.dtype,
            config=WeightConfig(32, 16, k, 128, k, 2, 2, 1 << 26, shares=2),
            interpret=TWO_CORES,
        )
        _, expected = oracle.gradients(lhs, np.zeros((groups, k, n)), grad, sizes, offset)
    assert oracle.relative_l2(out, expected) <= oracle.TOLERANCE["float32"]
    assert not _races()


@pytest.mark.parametrize(("shares", "cores"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("gating", ["concatenated", "interleaved"])
def test_gates_are_free_of_memory_errors(gating, shares, cores):
    rng = np.random.default_rng(2)
    lhs, rhs, bias = (
        jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((48, 128), (3, 512, 128), (3, 512))
    )
    sizes = [20, 0, 15]
    epilogue = Epilogue("silu", gating, bias=True)
    with jax.sharding.use_abstract_mesh(V6E):
        out = gmm(
            lhs,
            rhs,
            jnp.asarray(sizes, jnp.int32),
            jnp.zeros(1, jnp.int32),
            bias,
            transpose_rhs=True,
            out_dtype=lhs.dtype,
            epilogue=epilogue,
            config=Config(16, 128, 128, 3, 2, True, False, 1 << 26, shares),
            interpret=CHECKED if cores == 1 else TWO_CORES,
        )
    of_row = np.repeat([0, 2], [20, 15])
    product = oracle.ragged_dot(lhs, rhs, sizes, transpose_rhs=True)
    product[:35] += np.asarray(bias, np.float64)[of_row]
    expected = epilogue.whole(jnp.asarray(product)) * (np.arange(48) < 35)[:, None]
    assert oracle.relative_l2(out, oracle.f64(expected)) <= 1e-5
    assert not _races()


@pytest.mark.parametrize("ring", [RINGS["resident"], RINGS["stream"]], ids=["resident", "stream"])
@pytest.mark.parametrize("kind", ["int8", "mxfp4"])
def test_quantised_weights_are_free_of_memory_errors(kind, ring):
    """With scales that travel beside pieces; of int8, parts of K and a last piece that is shorter."""
    resident, by_group, slots = ring
    rng = np.random.default_rng(3)
    m, k, n, sizes = 48, 256, 320 if kind == "int8" else 256, [20, 0, 15]
    if kind == "int8":
        weights = jnp.asarray(rng.integers(-127, 128, (3, n, k)), jnp.int8)
        scale = jnp.asarray(rng.random((3, 1, n)) / 1000, jnp.float32)
    else:
        blocks, exponents = rng.integers(0, 256, (3, n, k // 32, 16)), rng.integers(119, 123, (3, n, k // 32))
        weights, scale = pack_mxfp4(jnp.asarray(blocks, jnp.uint8), jnp.asarray(exponents, jnp.uint8))
    values = dequantise(weights, scale, k=k, transposed=kind == "int8")
    lhs = jnp.asarray(rng.standard_normal((m, k)), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(V6E):
        out = gmm(
            lhs,
            weights,
            jnp.asarray(sizes, jnp.int32),
            jnp.zeros(1, jnp.int32),
            scale=scale,
            transpose_rhs=kind == "int8",
            out_dtype=lhs.dtype,
            config=Config(
                32,
                128,
                128 if kind == "int8" else k,
                slots,
                1 if resident else 3,
                by_group,
                resident,
                1 << 26,
            ),
            interpret=CHECKED,
        )
    expected = oracle.ragged_dot(lhs, values, sizes, transpose_rhs=kind == "int8")
    assert oracle.relative_l2(out, expected) <= 1e-2
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
