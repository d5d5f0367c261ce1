"""Named calls of the op: small ones for tests, large ones for compiling, simulating and tuning."""

from __future__ import annotations

from .call import Call


def _call(
    name: str, heads: tuple[int, int], length: int, dim: int, dtype: str = "bfloat16", *, causal: bool = True
) -> Call:
    query, key = ((1, each, length, dim) for each in heads)
    arguments = {"query": (query, dtype), "key": (key, dtype), "value": (key, dtype)}
    return Call("attention", name, arguments, {"causal": causal})


def examples() -> list[Call]:
    """Small calls, whose results `tpu-kernels check` compares with the reference."""
    return [
        _call("shared-heads", (4, 2), 24, 64, "float32"),
        _call("several-blocks", (2, 1), 272, 32, "float32"),
        _call("all-keys", (3, 3), 40, 80, causal=False),
    ]


def benchmarks() -> list[Call]:
    """The prefill of real models: Qwen3-8B and Gemma 2 9B."""
    return [
        _call("qwen3-8b-1024", (32, 8), 1024, 128),
        _call("qwen3-8b-4096", (32, 8), 4096, 128),
        _call("gemma-2-9b-2048", (16, 8), 2048, 256),
    ]
