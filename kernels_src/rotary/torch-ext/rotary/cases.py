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


def _call(
    name: str,
    batch: int,
    heads: tuple[int, int],
    tokens: int,
    width: int,
    rotated: int,
    dtype: str,
    **static: int,
) -> Call:
    q, k = (
        (batch, tokens, count, width) if static.get("unsqueeze_dim") == 2 else (batch, count, tokens, width)
        for count in heads
    )
    table = ((1 if tokens > 1 else batch, tokens, rotated), dtype)
    return Call("rotary", name, {"q": (q, dtype), "k": (k, dtype), "cos": table, "sin": table}, static)


def examples() -> list[Call]:
    """Small calls, whose results `tpu-kernels check` compares with the reference."""
    return [
        _call("whole", 2, (3, 4), 7, 128, 128, "float32"),
        _call("partial", 2, (3, 4), 7, 80, 48, "bfloat16"),
        _call("decode", 5, (3, 4), 1, 64, 64, "float32"),
        _call("heads-last", 2, (3, 4), 7, 96, 32, "bfloat16", unsqueeze_dim=2),
    ]


def benchmarks() -> list[Call]:
    """Qwen3-30B-A3B, Qwen3.5-MoE, which rotates a quarter of a head, and gpt-oss, in decode and in prefill."""
    return [
        _call(f"{model}-{phase}", batch, heads, tokens, width, rotated, "bfloat16")
        for model, heads, width, rotated in (
            ("qwen3-30b-a3b", (32, 4), 128, 128),
            ("qwen3.5-moe", (16, 2), 256, 64),
            ("gpt-oss", (64, 8), 64, 64),
        )
        for phase, batch, tokens in (("decode", 64, 1), ("prefill", 1, 4096))
    ]
