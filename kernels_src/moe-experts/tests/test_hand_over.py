"""What happens to a layer's time, simulated, where one call hands over to grouped matmuls."""

from __future__ import annotations

import functools
import importlib.util

import jax
import numpy as np
import pytest
from moe_experts import functions
from moe_experts.activations import Gate
from moe_experts.composed import composed_experts
from moe_experts.config import MOST_TOKENS

from tpu_kernels import analysis

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="NOT RUN: libtpu is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]

EXPERTS, CHOICES, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768  # Qwen3-30B-A3B, on one chip
STEP = 1.1


@pytest.mark.parametrize("tpu", ["v5e", "v5p", "v6e", "tpu7x"])
def test_no_step_where_grouped_matmuls_take_over(tpu):
    last = MOST_TOKENS[tpu]
    fused, names = _simulated(functools.partial(functions.fused_experts, tpu=tpu), last, tpu)
    assert names == {"fused_experts"}
    # The next number of tokens that fills registers: of others, rows are padded in XLA (7 % more at 1025 on v6e).
    after, names = _simulated(functools.partial(functions.fused_experts, tpu=tpu), last + 16, tpu)
    assert names == {"ragged_dot"}
    composed = functools.partial(composed_experts, gate=Gate(), transposed=False, tpu=tpu, interpret=False)
    before, _ = _simulated(composed, last, tpu)
    assert after <= STEP * fused, "one call should have gone on"
    assert fused <= STEP * before, "grouped matmuls should have begun before"


def _simulated(layer, tokens, tpu):
    """Milliseconds of kernels and, estimated, of XLA's ops; the kernels' names."""
    arrays = [
        jax.ShapeDtypeStruct(*array)
        for array in (
            ((tokens, HIDDEN), "bfloat16"),
            ((tokens, CHOICES), "int32"),
            ((tokens, CHOICES), "float32"),
            ((EXPERTS, 2 * INTERMEDIATE, HIDDEN), "bfloat16"),
            ((EXPERTS, HIDDEN, INTERMEDIATE), "bfloat16"),
        )
    ]
    draw = np.random.default_rng(0).random((tokens, EXPERTS))
    index = np.argsort(draw, axis=1)[:, :CHOICES]
    profile = analysis.simulate(layer, *arrays, tpu=tpu, data={"top_k_index": index})
    return profile.time_ms + profile.xla_ms, {kernel.name for kernel in profile.kernels}
