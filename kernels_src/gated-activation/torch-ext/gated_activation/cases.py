"""Named calls of the ops: small ones for tests, large ones for compiling, simulating and tuning."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of one of the kernel's ops.

    Attributes:
      op: name of the op.
      part: the call's name.
      arguments: arrays by name: a pair of shape and dtype, or (nested) lists of integers that count.
      static: other arguments.
    """

    op: str
    part: str
    arguments: dict[str, Any]
    static: dict[str, Any] = dataclasses.field(default_factory=dict)


def _separate(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    scale: tuple[tuple[int, ...], str] | None = None,
    **static: str,
) -> Call:
    arguments: dict[str, Any] = {"gate": (shape, dtype), "up": (shape, dtype)}
    if scale is not None:
        arguments |= {"gate_scale": scale, "up_scale": scale}
    return Call("gated_activation", name, arguments, static)


def _concatenated(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    scale: tuple[tuple[int, ...], str] | None = None,
    **static: str,
) -> Call:
    arguments = {"x": ((*shape[:-1], 2 * shape[-1]), dtype)} | ({} if scale is None else {"scale": scale})
    return Call("act_and_mul", name, arguments, static)


def examples() -> list[Call]:
    """Small calls, whose results `tpu-kernels check` compares with the reference."""
    return [
        _separate("silu", (24, 200), "float32"),
        _separate("gelu", (3, 5, 130), "bfloat16", activation="gelu"),
        _separate("int8-rows", (40, 136), "int8", ((40, 1), "float32"), activation="gelu_tanh"),
        _separate("int8-columns", (24, 200), "int8", ((200,), "bfloat16")),
        _concatenated("aligned", (40, 384), "float32"),
        _concatenated("unaligned", (3, 5, 130), "bfloat16", activation="relu"),
        _concatenated("int8-columns", (24, 128), "int8", ((256,), "float32"), activation="sigmoid"),
    ]


def benchmarks() -> list[Call]:
    """The MLPs of Qwen3-8B and of Llama 3.1 8B, in decode and in prefill; and an int8 one, scaled by column."""
    calls = [
        make(f"{model}-{phase}{suffix}", (tokens, intermediate), "bfloat16")
        for model, intermediate in (("qwen3-8b", 12288), ("llama-3.1-8b", 14336))
        for phase, tokens in (("decode", 64), ("prefill", 4096))
        for make, suffix in ((_separate, ""), (_concatenated, "-concatenated"))
    ]
    return [*calls, _separate("qwen3-8b-prefill-int8", (4096, 12288), "int8", ((12288,), "bfloat16"))]
