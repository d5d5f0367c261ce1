"""Named calls of the op: small ones for tests, large ones for compiling, simulating and tuning."""

from __future__ import annotations

from .call import Call


def _call(
    name: str,
    index: list[list[int]],
    experts: int,
    hidden: int,
    inner: int,
    dtype: str = "bfloat16",
) -> Call:
    arguments = {
        "hidden_states": ((len(index), hidden), dtype),
        "top_k_index": index,
        "top_k_weights": ((len(index), len(index[0])), "float32"),
        "gate_up_proj": ((experts, 2 * inner, hidden), dtype),
        "down_proj": ((experts, hidden, inner), dtype),
    }
    return Call("experts", name, arguments)


def _routed(tokens: int, choices: int, experts: int) -> list[list[int]]:
    return [[(7 * token + choice) % experts for choice in range(choices)] for token in range(tokens)]


def examples() -> list[Call]:
    """Small calls, whose results `tpu-kernels check` compares with the reference."""
    return [
        _call("two-of-five", _routed(9, 2, 5), 5, 72, 128, "float32"),
        _call("padded", _routed(3, 1, 2), 2, 64, 96, "float32"),
        # Index 4 is another rank's expert.
        _call("other-ranks", [[0, 4], [4, 4], [3, 1]], 4, 136, 256),
    ]


def benchmarks() -> list[Call]:
    """The experts of real models in decode, on one chip of eight with expert parallelism."""
    return [
        _call("qwen3-30b-a3b-ep8", _routed(64, 8, 16), 16, 2048, 768),
        _call("mixtral-8x7b-ep8", _routed(16, 1, 1), 1, 4096, 14336),
    ]
