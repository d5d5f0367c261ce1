"""Named calls of the op: small ones for tests, large ones for compiling, simulating and tuning."""

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


# The scoring of real models, with the numbers of tokens, experts and choices left out.
QWEN3 = {"scoring_func": "softmax", "norm_topk_prob": True}
DEEPSEEK_V3 = {"scoring_func": "sigmoid", "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
DEEPSEEK_V2 = {
    "norm_topk_prob": False,
    "routed_scaling_factor": 16.0,
    "n_group": 8,
    "topk_group": 3,
    "group_top": 1,
}


def _call(name: str, tokens: int, experts: int, top_k: int, dtype: str, bias: bool, **static: Any) -> Call:
    arguments: dict[str, Any] = {"logits": ((tokens, experts), dtype)}
    if bias:
        arguments["correction_bias"] = ((experts,), "float32")
    return Call("route", name, arguments, {"top_k": top_k, **static})


def examples() -> list[Call]:
    """Small calls, whose results `tpu-kernels check` compares with the reference."""
    return [
        _call("softmax", 24, 60, 4, "float32", False, **QWEN3),
        _call("several-blocks", 300, 128, 8, "bfloat16", False, **QWEN3),
        _call("biased-groups", 20, 64, 8, "float32", True, **DEEPSEEK_V3),
        _call("groups", 20, 160, 6, "float32", False, **DEEPSEEK_V2),
    ]


def benchmarks() -> list[Call]:
    """The routers of Qwen3-30B-A3B, Qwen3.5-MoE and DeepSeek V3, in decode and in prefill."""
    return [
        _call(f"{model}-{phase}", tokens, experts, top_k, dtype, bias, **static)
        for model, experts, top_k, dtype, bias, static in (
            ("qwen3-30b-a3b", 128, 8, "bfloat16", False, QWEN3),
            ("qwen3.5-moe", 512, 10, "bfloat16", False, QWEN3),
            ("deepseek-v3", 256, 8, "float32", True, DEEPSEEK_V3),
        )
        for phase, tokens in (("decode", 64), ("prefill", 4096))
    ]
