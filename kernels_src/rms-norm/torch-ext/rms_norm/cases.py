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


def _plain(name: str, shape: tuple[int, ...], dtype: str, **static: float) -> Call:
    return Call("rms_norm", name, {"x": (shape, dtype), "weight": (shape[-1:], dtype)}, static)


def _added(name: str, shape: tuple[int, ...], dtype: str, **static: float) -> Call:
    arguments = {"x": (shape, dtype), "residual": (shape, dtype), "weight": (shape[-1:], dtype)}
    return Call("add_rms_norm", name, arguments, static)


def examples() -> list[Call]:
    """Small calls, whose results `tpu-kernels check` compares with the reference."""
    return [
        _plain("rows", (24, 200), "float32"),
        _plain("zero-centred", (3, 5, 130), "bfloat16", epsilon=1e-5, offset=1.0),
        _plain("several-blocks", (300, 40), "float32"),
        _added("residual", (3, 7, 130), "float32"),
        _added("several-blocks", (264, 24), "bfloat16", offset=1.0),
    ]


def benchmarks() -> list[Call]:
    """The norms of real models, Qwen3-8B and Qwen3-30B-A3B, in decode and in prefill."""
    return [
        make(f"{model}-{phase}{suffix}", (tokens, hidden), "bfloat16")
        for model, hidden in (("qwen3-8b", 4096), ("qwen3-30b-a3b", 2048))
        for phase, tokens in (("decode", 64), ("prefill", 4096))
        for make, suffix in ((_plain, ""), (_added, "-residual"))
    ]
