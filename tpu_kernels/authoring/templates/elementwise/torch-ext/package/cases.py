"""Named calls of the op: small ones for tests, large ones for compiling, simulating and tuning."""

from __future__ import annotations

from .call import Call


def _call(name: str, shape: tuple[int, ...], dtype: str) -> Call:
    return Call("swiglu", name, {"gate": (shape, dtype), "up": (shape, dtype)})


def examples() -> list[Call]:
    """Small calls, whose results `tpu-kernels check` compares with the reference."""
    return [
        _call("rows", (24, 200), "float32"),
        _call("three-axes", (3, 5, 130), "bfloat16"),
        _call("several-blocks", (300, 384), "float32"),
    ]


def benchmarks() -> list[Call]:
    """The sizes of real models: the MLPs of Qwen3-8B and of Llama 3.1 8B, in decode and in prefill."""
    return [
        _call(f"{model}-{phase}", (tokens, intermediate), "bfloat16")
        for model, intermediate in (("qwen3-8b", 12288), ("llama-3.1-8b", 14336))
        for phase, tokens in (("decode", 64), ("prefill", 4096))
    ]
