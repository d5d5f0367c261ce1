"""The real TPU compiler on every generation that the kernel claims, at the shapes of real models."""

from __future__ import annotations

import functools
import importlib.util
import math
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest
from attention import flash, functions
from attention.cases import CASES

from tpu_kernels import analysis

BUILD = tomllib.loads((Path(__file__).parents[1] / "build.toml").read_text())
GENERATIONS = BUILD["tpu"]["generations"]
BY_NAME = {case.name: case for case in CASES}

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="NOT RUN: libtpu is not installed"),
    pytest.mark.timeout(1200),
]

# Case, sequences, keys, new tokens, dtype. 1032 keys are no whole number of bfloat16 tiles, 1000 none of lanes.
REPRESENTATIVE = [
    ("qwen3-30b-a3b", 8, 4096, 1, "bfloat16"),
    ("qwen3-30b-a3b", 3, 1032, 4, "bfloat16"),
    ("gpt-oss-20b-sliding", 64, 4096, 1, "bfloat16"),
    ("gpt-oss-20b-full", 1, 1000, 8, "bfloat16"),
    ("gemma-4-26b-a4b-full", 2, 1024, 1, "float32"),
    ("phi-3-mini", 2, 512, 1, "bfloat16"),
]
WHOLE = [
    (case.name, *form)
    for case in CASES
    for form in (
        (8, 4096, 1, "bfloat16"),
        (3, 1032, 4, "bfloat16"),
        (1, 1000, 8, "float32"),
        (1, 131072, 1, "bfloat16"),
    )
]


# Query heads, kv heads, D, E, L, S, dtype, what else: prefill and its gradient.
PASSES = [(4, 2, 192, 128, 384, 1000, "bfloat16", {"causal": True, "window": 128, "sinks": True})]
# Heads as in CASES; a diffusion transformer; keys whose gradients come piece by piece.
WHOLE_PASSES = [
    (8, 1, 64, 64, 1024, 1024, "bfloat16", {"causal": True, "window": 128, "sinks": True}),
    (4, 4, 192, 128, 384, 4000, "bfloat16", {}),
    *[
        (case.heads, case.kv_heads, case.head_dim, case.head_dim, keys, keys, dtype, form)
        for case in CASES
        for form in [{"causal": True, "window": case.window, "softcap": case.softcap, "sinks": case.sinks}]
        for keys, dtype in ((8192, "bfloat16"), (1000, "float32"))
    ],
    (24, 24, 64, 64, 4173, 4173, "bfloat16", {}),
    (8, 1, 128, 128, 4096, 131072, "bfloat16", {"causal": True}),
]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_prefill_and_its_gradient_compile(generation):
    _compile_passes(generation, PASSES)


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
def test_whole_matrix_of_passes_compiles(generation):
    _compile_passes(generation, WHOLE_PASSES)


def _compile_passes(generation: str, programs: list[tuple]) -> None:
    jobs = [_pass(generation, *program) for program in programs]
    for program, report in zip(programs, analysis.compile_many(jobs), strict=True):
        assert report.compiled, f"{program}: {report.failure}"
        names = [kernel.name for kernel in report.kernels]
        # The gradient may come piece by piece.
        assert ["gradient" in name for name in names] == [False] + [True] * (len(names) - 1), program
        assert len(names) >= 2, program
        # Queries and keys come as XLA stores them, also where it does with tokens on lanes.
        turned = [op for op in report.ops if op.kind in ("layout copy", "transpose", "pad")]
        heads, _, dim, _, queries, *_ = program
        assert max((op.bytes for op in turned), default=0) < heads * queries * dim, f"{program}: {turned}"


def _pass(generation, heads, kv_heads, dim, value_dim, queries, keys, dtype, form):
    form = dict(form)
    sinks = form.pop("sinks", False)
    shapes = [
        (heads, queries, dim),
        (kv_heads, keys, dim),
        (kv_heads, keys, value_dim),
        (heads, queries, value_dim),
    ]
    arrays = [jax.ShapeDtypeStruct((1, *shape), dtype) for shape in shapes]
    arrays += [jax.ShapeDtypeStruct((heads,), dtype)] * sinks

    def step(query, key, value, grad, *sinks):
        def attention(query, key, value, *sinks):
            return flash.flash_attention(query, key, value, None, None, *sinks, **form, tpu=generation)[0]

        out, pullback = jax.vjp(attention, query, key, value, *sinks)
        return out, pullback(grad)

    return analysis.Job(step, tuple(arrays), generation)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_compiles_without_copying_the_cache(generation):
    _compile(generation, REPRESENTATIVE)


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
def test_whole_matrix_compiles(generation):
    _compile(generation, WHOLE)


@pytest.mark.parametrize(
    "generation",
    ["v6e", *[pytest.param(each, marks=pytest.mark.slow) for each in GENERATIONS if each != "v6e"]],
)
def test_append_writes_donated_caches_in_place(generation):
    _compile_appends(generation, REPRESENTATIVE[1:3])


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
def test_whole_matrix_of_appends_compiles(generation):
    _compile_appends(generation, WHOLE)


def _compile_appends(generation: str, programs: list[tuple]) -> None:
    jobs = [_append_job(generation, *program) for program in programs]
    for program, job, report in zip(programs, jobs, analysis.compile_many(jobs), strict=True):
        assert report.compiled, f"{program}: {report.failure}"
        assert [kernel.name for kernel in report.kernels] == ["decode_attention"], program
        _check_unmoved(program, report)
        query, key, *_ = job.args
        # Of the results only the attention's own is new memory.
        assert report.memory.outputs < math.prod(query.shape) * 128 * query.dtype.itemsize, program
        assert report.memory.temporaries < math.prod(key.shape) * key.dtype.itemsize / 2, program


@pytest.mark.skipif(
    importlib.util.find_spec("pydantic") is None,
    reason="NOT RUN: tpu-kernels, with the simulator, is not installed",
)
def test_what_an_append_moves():
    """The tiles touched are written, and keys that are the values are read once."""
    name, sequences, keys, *others = REPRESENTATIVE[0]
    heads, dim = sequences * BY_NAME[name].kv_heads, BY_NAME[name].head_dim
    for shared, caches in ((False, 2), (True, 1)):
        job = _append_job("v6e", name, sequences, keys, *others, shared=shared)
        place = 3 - shared
        profile = analysis.simulate(job.fn, *job.args, data={f"arg{place}": np.full(sequences, keys)})
        moved = [(each.read_bytes, each.written_bytes) for each in profile.traffic]
        read, written = (sum(each) for each in zip(*moved, strict=True))
        result = math.prod(job.args[0].shape) * 2
        assert read - caches * heads * keys * dim * 2 < 4 * result
        assert written == caches * heads * 16 * dim * 2 + result


def _append_job(
    generation: str, name: str, sequences: int, keys: int, new: int, dtype: str, shared: bool = False
) -> analysis.Job:
    case = BY_NAME[name]
    arrays, static = case.call(sequences, keys, new, dtype)
    rows = (sequences, case.kv_heads, new, case.head_dim), dtype
    arrays |= {"new_key": rows, "new_value": rows}
    if shared:
        del arrays["value"], arrays["new_value"]

    def function(*given: jax.Array) -> tuple[jax.Array, ...]:
        named = dict(zip(arrays, given, strict=True))
        return functions.append_attention(
            **{"value": None, "new_value": None, **named}, **static, tpu=generation
        )

    shapes = tuple(jax.ShapeDtypeStruct(*array) for array in arrays.values())
    donated = tuple(place for place, array in enumerate(arrays) if array in ("key", "value"))
    return analysis.Job(function, shapes, generation, donated=donated)


def _job(generation: str, name: str, sequences: int, keys: int, new: int, dtype: str) -> analysis.Job:
    arrays, static = BY_NAME[name].call(sequences, keys, new, dtype)

    def attention(arrays: dict[str, jax.Array]) -> jax.Array:
        return functions.decode_attention(**arrays, **static, tpu=generation)

    # By position, as a job has its arguments.
    def function(*given: jax.Array) -> jax.Array:
        return attention(dict(zip(arrays, given, strict=True)))

    shapes = tuple(jax.ShapeDtypeStruct(*array) for array in arrays.values())
    return analysis.Job(functools.partial(function), shapes, generation)


def _compile(generation: str, programs: list[tuple[str, int, int, int, str]]) -> None:
    reports = analysis.compile_many([_job(generation, *program) for program in programs])
    for program, report in zip(programs, reports, strict=True):
        assert report.compiled, f"{program}: {report.failure}"
        assert [kernel.name for kernel in report.kernels] == ["decode_attention"], program
        _check_unmoved(program, report)


def _check_unmoved(program: tuple, report: analysis.CompileReport) -> None:
    name, sequences, keys, _, dtype = program
    case = BY_NAME[name]
    cache = sequences * case.kv_heads * keys * case.head_dim * (2 if dtype == "bfloat16" else 4)
    moved = [op for op in report.ops if op.kind in ("layout copy", "transpose", "pad", "copy", "move")]
    assert sum(op.bytes for op in moved) < cache / 2, f"{program}: XLA moves the cache: {moved}"
