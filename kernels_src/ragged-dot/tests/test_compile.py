"""The real TPU compiler on every generation that the kernel claims, at the shapes of real models."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from ragged_dot.cases import CASES, ROWS

HERE = Path(__file__).parent
GENERATIONS = tomllib.loads((HERE.parent / "build.toml").read_text())["tpu"]["generations"]
CASE = {case.name: case for case in CASES}

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="NOT RUN: libtpu is not installed"),
    pytest.mark.timeout(1200),
]

REPRESENTATIVE = [["forward", name, 64, "bfloat16"] for name in CASE]
REPRESENTATIVE += [["backward", "qwen3-30b-a3b-gate-up", 512, "bfloat16"]]
REPRESENTATIVE += [["forward", "gemma-4-26b-a4b-down", 13, "float32"]]
REPRESENTATIVE += [["layer", "qwen3-30b-a3b-gate-up", 8, "bfloat16"]]
REPRESENTATIVE += [["layer", "gemma-4-26b-a4b-gate-up", 64, "bfloat16"]]
REPRESENTATIVE += [["int8", "qwen3-30b-a3b-gate-up", 64, "bfloat16"]]
REPRESENTATIVE += [["mxfp4", "qwen3-30b-a3b-down", 64, "bfloat16"]]
WHOLE = [
    [program, name, rows, dtype]
    for program, dtype in (("forward", "bfloat16"), ("backward", "bfloat16"), ("forward", "float32"))
    for name in CASE
    for rows in ROWS
]
WHOLE += [
    [program, name, rows, "bfloat16"]
    for program in ("int8", "mxfp4")
    for name in CASE
    if not name.startswith("mixtral")
    for rows in (8, 512, 8192)
]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_compiles_without_copying_weights(generation):
    _compile(generation, REPRESENTATIVE)


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
def test_whole_matrix_compiles(generation):
    _compile(generation, WHOLE)


def _compile(generation: str, programs: list[list[object]]) -> None:
    command = [sys.executable, str(HERE / "compile_worker.py"), generation, json.dumps(programs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100, check=False)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == len(programs), f"the compiler ended early: {done.stderr[-2000:]}"
    failed = [r for r in results if "error" in r]
    assert not failed, "\n".join(f"{r['program']}: {r['error'][-600:]}" for r in failed)
    for result in results:
        program, name, _, dtype = result["program"]
        case = CASE[name]
        size = {"int8": 1, "mxfp4": 0.5}.get(program, 2 if dtype == "bfloat16" else 4)
        weights = case.groups * case.k * case.n * size
        if program != "backward":
            assert result["copied_bytes"] < weights, f"{result['program']} copies its weights"
