"""Compiles the kernels for one TPU generation with libtpu, and prints a JSON line a program.

A process of its own, because libtpu takes the process over, and a compiler that crashes should only lose that.

    python compile_worker.py v6e '[["forward", "qwen3-30b-a3b-down", 64, "bfloat16"]]'
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback

os.environ.update(
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    JAX_PLATFORMS="cpu",
    TF_CPP_MIN_LOG_LEVEL="3",
    TPU_ACCELERATOR_TYPE="v6e-4",
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
)
os.environ.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", ".."))  # noqa: PTH118, PTH120

import conftest  # noqa: F401  makes ragged_dot importable
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding
from ragged_dot import functions
from ragged_dot.cases import CASES
from ragged_dot.quantised import PER_WORD, exponents_of, packed_depth

TOPOLOGY = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
CHOICES = 8
KIND = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}


def compile_text(generation: str, program: str, case_name: str, rows: int, dtype: str) -> str:
    """The optimised HLO of one program."""
    device = topologies.get_topology_desc(topology_name=TOPOLOGY[generation], platform="tpu").devices[0]
    sharding = SingleDeviceSharding(device)
    case = next(c for c in CASES if c.name == case_name)

    def array(shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    shape = (case.n, case.k) if case.transpose_rhs else (case.k, case.n)
    lhs, rhs = array((rows, case.k)), array((case.groups, *shape))
    sizes = array((case.groups,), jnp.int32)

    def forward(lhs, rhs, sizes):
        return functions.ragged_dot(lhs, rhs, sizes, transpose_rhs=case.transpose_rhs, tpu=generation)

    def quantised(lhs, rhs, sizes, scale):
        transpose_rhs = case.transpose_rhs and rhs.dtype == jnp.int8
        return functions.ragged_dot(
            lhs, rhs, sizes, rhs_scale=scale, transpose_rhs=transpose_rhs, tpu=generation
        )

    def backward(lhs, rhs, sizes, grad):
        return jax.vjp(lambda lhs, rhs: forward(lhs, rhs, sizes), lhs, rhs)[1](grad)

    def layer(states, index, weights, gate_up, down):
        return functions.experts(states, index, weights, gate_up, down, tpu=generation)

    function, arguments = forward, (lhs, rhs, sizes)
    if program == "backward":
        function, arguments = backward, (*arguments, array((rows, case.n)))
    elif program == "int8":
        scale = array((case.groups, case.n), jnp.float32)
        function, arguments = quantised, (lhs, array((case.groups, *shape), jnp.int8), sizes, scale)
    elif program == "mxfp4":
        words, exponents = packed_depth(case.k) // PER_WORD, exponents_of(case.k)
        weights = array((case.groups, words, case.n), jnp.int32)
        scale = array((case.groups, exponents, case.n), jnp.uint8)
        function, arguments = quantised, (lhs, weights, sizes, scale)
    elif program == "layer":  # the whole experts layer whose gate and up projection the case is
        inner = case.n // 2
        choices, states = (rows, CHOICES), array((rows, case.k))
        routing = array(choices, jnp.int32), array(choices, jnp.float32)
        function, arguments = layer, (states, *routing, rhs, array((case.groups, case.k, inner)))
    mesh = AbstractMesh(
        (), (), abstract_device=AbstractDevice(device_kind=KIND[generation], num_cores=1, platform="tpu")
    )
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
    return lowered.compile().as_text()


def copied_bytes(text: str) -> int:
    """The size of the largest array that XLA copies or transposes around the kernels."""
    largest = 0
    for dtype, shape in re.findall(r"= ([a-z]+\d+)\[([\d,]+)\]\S* (?:copy|transpose)\(", text):
        elements = 1
        for axis in shape.split(","):
            elements *= int(axis)
        largest = max(largest, elements * int(re.sub(r"\D", "", dtype)) // 8)
    return largest


if __name__ == "__main__":
    for program in json.loads(sys.argv[2]):
        try:
            text = compile_text(sys.argv[1], *program)
            print(json.dumps({"program": program, "copied_bytes": copied_bytes(text)}), flush=True)
        except Exception:  # noqa: BLE001  whatever the compiler says is the result
            print(json.dumps({"program": program, "error": traceback.format_exc(limit=1)}), flush=True)
