"""Named calls of the op: small ones for tests, large ones for compiling, simulating and tuning."""

from __future__ import annotations

from .call import Call


def _call(name: str, m: int, k: int, n: int, dtype: str = "bfloat16") -> Call:
    return Call("matmul", name, {"lhs": ((m, k), dtype), "rhs": ((k, n), dtype)})


def examples() -> list[Call]:
    """Small calls, whose results `tpu-kernels check` compares with the reference."""
    return [
        _call("one-block", 24, 130, 200, "float32"),
        _call("two-steps", 40, 640, 136, "float32"),
        _call("rounded", 16, 144, 260),
    ]


def benchmarks() -> list[Call]:
    """The projections of real models: into the MLPs of Qwen3-8B and of Llama 3.1 8B, in decode and in prefill."""
    return [
        _call(f"{model}-{phase}", tokens, 4096, intermediate)
        for model, intermediate in (("qwen3-8b", 12288), ("llama-3.1-8b", 14336))
        for phase, tokens in (("decode", 64), ("prefill", 2048))
    ]
