"""Named calls of the op: small ones for tests, large ones for compiling, simulating and tuning."""

from __future__ import annotations

from .call import Call


def _call(name: str, shape: tuple[int, ...], dtype: str, epsilon: float = 1e-6) -> Call:
    arguments = {"x": (shape, dtype), "weight": (shape[-1:], dtype)}
    return Call("rms_norm", name, arguments, {"epsilon": epsilon})


def examples() -> list[Call]:
    """Small calls, whose results `tpu-kernels check` compares with the reference."""
    return [
        _call("rows", (24, 200), "float32"),
        _call("three-axes", (3, 5, 130), "bfloat16", 1e-5),
        _call("several-blocks", (300, 384), "float32"),
    ]


def benchmarks() -> list[Call]:
    """The norms of real models, Qwen3-8B and Qwen3-30B-A3B, in decode and in prefill."""
    return [
        _call(f"{model}-{phase}", (tokens, hidden), "bfloat16")
        for model, hidden in (("qwen3-8b", 4096), ("qwen3-30b-a3b", 2048))
        for phase, tokens in (("decode", 64), ("prefill", 4096))
    ]
