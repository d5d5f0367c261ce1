"""What the kernel does to memory: races, bounds, uninitialised reads, by Pallas' TPU interpreter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import flash, functions, reference
from attention.flash_tiles import Blocks
from attention.shapes import Config
from attention_oracle import TOLERANCE, attention_pass, f64, relative_l2, step
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

# "padded": reading a tile's padding is what the hardware does; whatever stands there must not matter.
CHECKED = pltpu.InterpretParams(
    detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan", buffer_bounds="padded"
)
V6E = AbstractMesh(
    (), (), abstract_device=AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
)
VMEM = 1 << 26

# lengths, query heads, kv heads, S, D, config, what else
STEPS = {
    "one-token": ([1], 1, 1, 128, 128, None, {}),
    "nothing": ([0, 0, 0], 4, 1, 64, 128, None, {}),
    "lengths": ([1, 512, 0, 300, 16, 17], 4, 1, 512, 128, Config(1, 128, 2, 2, 1, VMEM), {}),
    "nothing-first": ([0, 0, 512], 8, 4, 512, 128, Config(4, 128, 4, 3, 1, VMEM), {}),
    "heads-in-a-tile": ([500, 1], 12, 4, 512, 128, Config(4, 256, 2, 2, 1, VMEM), {"sinks": True}),
    "keys-on-lanes": ([1000, 1, 1024, 0, 129], 4, 1, 1024, 64, None, {}),
    "ragged-keys-on-lanes": ([1000, 1032, 999], 4, 2, 1032, 80, None, {}),
    "values-on-lanes": ([300, 17], 4, 2, 300, 128, None, {"value_dim": 64}),
    "half-tiles": ([392, 9], 32, 2, 392, 128, Config(2, 128, 2, 2, 1, VMEM), {"dtype": "bfloat16"}),
    "bfloat16": ([511, 130], 16, 8, 512, 256, None, {"dtype": "bfloat16", "softcap": 5.0}),
    "window": ([5, 130, 511, 512], 16, 8, 512, 128, None, {"window": 200, "dtype": "bfloat16"}),
    "window-on-lanes": ([1024, 131, 300], 64, 8, 1024, 64, None, {"window": 128, "sinks": True}),
    "left-padding": ([200, 190, 256], 4, 2, 256, 128, None, {"starts": [0, 189, 77]}),
    "new-tokens": ([512, 7, 131], 8, 2, 512, 128, Config(2, 128, 2, 3, 1, VMEM), {"new": 8, "window": 90}),
    "chunks": ([300, 0, 128, 5], 4, 2, 384, 128, Config(1, 128, 2, 2, 4, VMEM), {}),
}  # fmt: skip


# What the pass is, and its blocks: several steps of held keys, whole tiles and edges, several heads, keys on lanes.
PASSES = {
    "whole-tiles-and-edges": (
        {"heads": 2, "kv_heads": 1, "queries": 200, "keys": 650, "dim": 128, "causal": True, "starts": [3],
         "ends": [640]},
        Blocks(128, 256, 128, 512, 2, 1, VMEM),
    ),
    "keys-on-lanes": (
        {"heads": 4, "kv_heads": 2, "queries": 130, "keys": 400, "dim": 64, "dtype": "bfloat16", "sinks": True},
        Blocks(256, 128, 128, 128, 4, 2, VMEM),
    ),
    "window": (
        {"heads": 2, "kv_heads": 2, "queries": 300, "keys": 300, "dim": 128, "value_dim": 64, "causal": True,
         "window": 100},
        Blocks(128, 256, 128, 256, 1, 1, VMEM),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_interpreter():
    yield
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("sample", STEPS.values(), ids=STEPS)
def test_kernel_is_free_of_memory_errors(sample):
    lengths, heads, kv_heads, keys, dim, config, form = sample
    made = step(lengths, heads=heads, kv_heads=kv_heads, keys=keys, dim=dim, **form)
    with jax.sharding.use_abstract_mesh(V6E):
        out = functions.decode_attention(*made.operands, config=config, interpret=CHECKED, **made.form)
    assert relative_l2(out, made.expected()) <= TOLERANCE[form.get("dtype", "float32")]
    assert not _races()


# Of those with new tokens that touch two tiles, half a tile, keys on lanes, several items of a sequence, chunks.
APPENDED = ("lengths", "ragged-keys-on-lanes", "values-on-lanes", "half-tiles", "new-tokens", "chunks")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each != "new-tokens")) for each in APPENDED]
)
def test_append_is_free_of_memory_errors(name):
    lengths, heads, kv_heads, keys, dim, config, form = STEPS[name]
    made = step(lengths, heads=heads, kv_heads=kv_heads, keys=keys, dim=dim, **form)
    query, key, value, *rest = made.operands
    rows = [jnp.full((*x.shape[:2], query.shape[2], x.shape[3]), 0.5, x.dtype) for x in (key, value)]
    given, places = (query, *rows, key, value, rest[0]), None
    with jax.sharding.use_abstract_mesh(V6E):
        out, *caches = functions.append_attention(
            *given, places, *rest[1:], config=config, interpret=CHECKED, **made.form
        )
    expected, *written = reference.append_attention(*given, places, *rest[1:], **made.form)
    assert relative_l2(out, f64(expected)) <= TOLERANCE[form.get("dtype", "float32")]
    for cache, wanted in zip(caches, written, strict=True):
        np.testing.assert_array_equal(f64(cache), f64(wanted))
    assert not _races()


@pytest.mark.parametrize(
    "sample",
    [
        pytest.param(each, marks=[pytest.mark.slow] * (name != "whole-tiles-and-edges"), id=name)
        for name, each in PASSES.items()
    ],
)
def test_flash_kernels_are_free_of_memory_errors(sample):
    form, blocks = sample
    made = attention_pass(batch=1, **form)
    query, key, value, starts, ends, sinks = made.operands

    def attention(query, key, value):
        return flash.flash_attention(
            query, key, value, starts, ends, sinks, blocks=blocks, interpret=CHECKED, **made.form
        )[0]

    with jax.sharding.use_abstract_mesh(V6E):
        out, pullback = jax.vjp(attention, query, key, value)
        gradients = pullback(made.grad)
    expected, _, of_operands = made.expected()
    tolerance = TOLERANCE[form.get("dtype", "float32")]
    assert relative_l2(out, expected) <= tolerance
    for got, wanted in zip(gradients, of_operands, strict=False):
        assert relative_l2(got, wanted) <= tolerance
    assert not _races()


def _races() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return bool(interpret_pallas_call.races.races_found)
