"""What the kernel does to memory: races, bounds, uninitialised reads, by Pallas' TPU interpreter."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from experts_oracle import TOLERANCE, layer, relative_l2
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh
from moe_experts import functions
from moe_experts.cases import GPT_OSS
from moe_experts.shapes import Config

# "padded": reading a tile's padding is what the hardware does; whatever stands there must not matter.
CHECKED = pltpu.InterpretParams(
    detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan", buffer_bounds="padded"
)
V6E = AbstractMesh(
    (), (), abstract_device=AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
)
VMEM = 1 << 26

# tokens, choices, experts of how many, H, I, config, what the layer is
LAYERS = {
    "one-token": (1, 2, 8, 32, 128, 128, None, {}),
    "no-work": (4, 2, 4, 4, 128, 128, None, {}),
    "chosen-pieces": (17, 4, 8, 32, 256, 192, None, {"dtype": "bfloat16"}),
    "ring": (20, 2, 4, 4, 640, 384, Config(256, 256, 2, 1, 0, VMEM), {}),
    "ring-transposed": (20, 2, 4, 4, 640, 384, Config(256, 256, 2, 2, 0, VMEM), {"transposed": True}),
    "two-experts-ahead": (8, 2, 6, 6, 256, 128, Config(128, 128, 4, 4, 0, VMEM), {"gated": False}),
    "gathered": (200, 2, 4, 8, 256, 128, Config(256, 128, 1, 2, 48, VMEM), {"dtype": "bfloat16"}),
    "gathered-transposed": (
        140, 1, 4, 4, 96, 160, Config(320, 96, 1, 1, 32, VMEM), {"dtype": "bfloat16", "biased": True, **GPT_OSS},
    ),
    "biased": (9, 4, 8, 8, 96, 160, None, {"biased": True, **GPT_OSS}),
    "interleaved-many-tokens": (140, 1, 3, 3, 64, 96, None, {**GPT_OSS}),
    "int8": (9, 2, 6, 8, 128, 256, None, {"dtype": "bfloat16", "quantised": "int8"}),
    "int8-gathered": (140, 1, 4, 4, 96, 160, Config(320, 96, 1, 1, 32, VMEM), {
        "dtype": "bfloat16", "biased": True, "quantised": "int8", **GPT_OSS}),
    "mxfp4": (9, 2, 6, 8, 160, 192, None, {"dtype": "bfloat16", "quantised": "mxfp4", "transposed": True}),
    "mxfp4-gathered": (140, 1, 4, 4, 96, 160, Config(320, 96, 1, 1, 32, VMEM), {
        "dtype": "bfloat16", "biased": True, "quantised": "mxfp4", **GPT_OSS}),
    "shared": (20, 2, 4, 8, 640, 384, Config(256, 256, 2, 1, 0, VMEM), {"shared": 384}),
    "shared-gathered": (140, 2, 4, 8, 128, 128, Config(256, 128, 2, 2, 64, VMEM), {
        "dtype": "bfloat16", "shared": 128}),
    "biased-not-transposed": (9, 4, 8, 8, 128, 256, None, {"biased": True}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_interpreter():
    yield
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("sample", LAYERS.values(), ids=LAYERS)
def test_kernel_is_free_of_memory_errors(sample):
    tokens, choices, experts, of, hidden, intermediate, config, form = sample
    rng = np.random.default_rng(0)
    index = np.stack([rng.permutation(max(of, choices))[:choices] for _ in range(tokens)])
    if of == experts == choices:
        index += experts  # nothing of it is here
    made = layer(index, experts=experts, hidden=hidden, intermediate=intermediate, **form)
    with jax.sharding.use_abstract_mesh(V6E):
        out = functions.fused_experts(*made.operands, config=config, interpret=CHECKED, **made.form)
    assert relative_l2(out, made.expected()) <= TOLERANCE[form.get("dtype", "float32")]
    assert not _races()


def _races() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return bool(interpret_pallas_call.races.races_found)
