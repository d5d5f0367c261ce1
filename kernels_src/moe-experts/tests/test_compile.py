"""The real TPU compiler on every generation that the kernel claims, at the shapes of real models."""

from __future__ import annotations

import functools
import importlib.util
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from moe_experts import functions
from moe_experts.cases import CASES, TOKENS, Case
from moe_experts.ragged_dot.quantised import PER_WORD, exponents_of, packed_depth

from tpu_kernels import analysis

BUILD = tomllib.loads((Path(__file__).parents[1] / "build.toml").read_text())
GENERATIONS = BUILD["tpu"]["generations"]
BY_NAME = {case.name: case for case in CASES}

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="NOT RUN: libtpu is not installed"),
    pytest.mark.timeout(1200),
]

REPRESENTATIVE = [
    ("qwen3-30b-a3b-ep8", 1, "bfloat16"),
    ("qwen3-30b-a3b-ep8", 256, "bfloat16"),
    ("qwen3-30b-a3b-ep8", 17, "float32"),
    ("gemma-4-26b-a4b", 64, "bfloat16"),
    ("gpt-oss-20b-ep8", 8, "bfloat16"),
    ("gpt-oss-20b-ep8", 256, "bfloat16"),
    ("nemotron-3-nano-ep8", 8, "bfloat16"),
    ("mixtral-8x7b-ep8", 8, "bfloat16"),
    ("qwen3.5-35b-a3b-shared", 8, "bfloat16"),
    ("qwen3-30b-a3b-ep8", 64, "int8"),
    ("gpt-oss-20b-ep8", 8, "int8"),
    ("qwen3-30b-a3b-ep8", 64, "mxfp4"),
]
WHOLE = [
    (case.name, tokens, dtype)
    for case in CASES
    for tokens in TOKENS
    for dtype in (("bfloat16", "float32") if case.shared else ("bfloat16", "float32", "int8", "mxfp4"))
]
WHOLE += [("odd", tokens, dtype) for tokens in (1, 5, 130) for dtype in ("bfloat16", "float32")]
ODD = Case("odd", 2, 4, 4, 100, 36, biased=True)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_compiles_without_copying_weights(generation):
    _compile(generation, REPRESENTATIVE)


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
def test_whole_matrix_compiles(generation):
    _compile(generation, WHOLE)


def _job(generation: str, name: str, tokens: int, dtype: str) -> analysis.Job:
    case = BY_NAME.get(name, ODD)
    weights, dtype = dtype, "bfloat16" if dtype in ("int8", "mxfp4") else dtype

    def array(*shape: int, dtype: str = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    experts, hidden, inner = case.experts, case.hidden, case.intermediate
    form, products = case.form, ((hidden, case.rows), (inner, hidden))  # K, N
    scales: list[jax.ShapeDtypeStruct] = []
    if weights == "mxfp4":
        form = {**form, "transposed": True}
        held = [array(experts, packed_depth(k) // PER_WORD, n, dtype="int32") for k, n in products]
        scales = [array(experts, exponents_of(k), n, dtype="uint8") for k, n in products]
    else:
        order = 1 if form.get("transposed") else -1
        held = [array(experts, *axes[::order], dtype=weights) for axes in products]
        if weights == "int8":
            scales = [array(experts, n, dtype="float32") for _, n in products]
    shared: list[jax.ShapeDtypeStruct] = []
    if case.shared:
        shared = [array(*held[0].shape[1:]), array(*held[1].shape[1:]), array(tokens, dtype="float32")]
    arguments = [
        array(tokens, hidden),
        array(tokens, case.choices, dtype=jnp.int32),
        array(tokens, case.choices, dtype=jnp.float32),
        *held,
        *([array(experts, n) for _, n in products] if case.biased else [None, None]),
        *(scales or [None, None]),
        *shared,
    ]
    # A new function each time: jax would else take one generation's trace for another.
    function = functools.partial(functions.fused_experts, tpu=generation, **form)
    return analysis.Job(function, tuple(arguments), generation)


def _compile(generation: str, programs: list[tuple[str, int, str]]) -> None:
    reports = analysis.compile_many([_job(generation, *program) for program in programs])
    for program, report in zip(programs, reports, strict=True):
        assert report.compiled, f"{program}: {report.failure}"
        case = BY_NAME.get(program[0], ODD)
        bits = 4 if program[2] == "mxfp4" else 8 * jnp.dtype(program[2]).itemsize
        one_expert = case.hidden * case.intermediate * bits // 8
        if case is ODD:
            continue
        moved = [op for op in report.ops if op.kind in ("layout copy", "transpose", "pad", "copy", "move")]
        assert sum(op.bytes for op in moved) < one_expert, f"{program}: XLA moves weights: {moved}"


def test_activations_are_not_copied_in_a_model():
    """XLA lays an entry's [256, 2880] out the other way, and copies it; between ops it does not."""
    job = _job("v6e", "gpt-oss-20b-ep8", 256, "bfloat16")
    hidden = job.args[0].shape[1]

    def block(projection, states, *others):
        states += jnp.matmul(states, projection)
        return jnp.matmul(states + job.fn(jax.nn.relu(states), *others), projection)

    projection = jax.ShapeDtypeStruct((hidden, hidden), "bfloat16")
    [report] = analysis.compile_many([analysis.Job(block, (projection, *job.args), "v6e")])
    assert report.compiled, report.failure
    copied = [op for op in report.ops if op.kind == "layout copy"]
    assert {op.source for op in copied} <= {"states"}, "the entry's is"
