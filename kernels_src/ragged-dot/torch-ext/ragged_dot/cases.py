"""Named cases: the shapes of real models, shared by tests, benchmarks and tuning."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """One grouped product of a model's experts layer.

    Attributes:
      name: model and projection.
      groups: G, the experts of the layer.
      k, n: contraction and columns.
      transpose_rhs: weights are stored as [G, N, K], as most models do.
    """

    name: str
    groups: int
    k: int
    n: int
    transpose_rhs: bool


def _layer(
    model: str, *, experts: int, hidden: int, intermediate: int, transpose_rhs: bool = True
) -> list[Case]:
    return [
        Case(f"{model}-gate-up", experts, hidden, 2 * intermediate, transpose_rhs),
        Case(f"{model}-down", experts, intermediate, hidden, transpose_rhs),
    ]


# Shapes from the models' published configurations. gpt-oss stores its weights as [G, K, N].
CASES: tuple[Case, ...] = (
    *_layer("qwen3-30b-a3b", experts=128, hidden=2048, intermediate=768),
    *_layer("gemma-4-26b-a4b", experts=128, hidden=2816, intermediate=704),
    *_layer("gpt-oss-20b", experts=32, hidden=2880, intermediate=2880, transpose_rhs=False),
    *_layer("mixtral-8x7b", experts=8, hidden=4096, intermediate=14336),
)
ROWS = (8, 64, 512, 8192)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of one of the kernel's ops.

    Attributes:
      op: name of the op.
      part: which part of the layer it is.
      arguments: arrays by name: a pair of shape and dtype, or integers that count.
      static: other arguments.
    """

    op: str
    part: str
    arguments: dict[str, Any]
    static: dict[str, Any]


def calls(workload: Any) -> list[Call]:
    """The calls of a model's experts layer, in bf16, for `tpu-kernels compile`, `simulate` and `tune`.

    Args:
      workload: the layer's sizes and routing: `hidden`, `intermediate`, `local_experts`, `experts`, `rows`,
        `group_sizes`, `transposed`, as in `tpu_kernels.analysis`.
    """
    stored_transposed = not workload.transposed

    def product(part: str, k: int, n: int) -> Call:
        weights = (workload.local_experts, *((n, k) if stored_transposed else (k, n)))
        arguments: dict[str, Any] = {
            "lhs": ((workload.rows, k), "bfloat16"),
            "rhs": (weights, "bfloat16"),
            "group_sizes": workload.group_sizes,
        }
        if workload.local_experts < workload.experts:
            arguments["group_offset"] = [0]
        return Call("ragged_dot", part, arguments, {"transpose_rhs": stored_transposed})

    return [
        product("gate-up", workload.hidden, 2 * workload.intermediate),
        product("down", workload.intermediate, workload.hidden),
        *_experts(workload),
    ]


def _experts(workload: Any) -> list[Call]:
    """The whole layer as one call, where all of its experts are here and the op has its activation."""
    if workload.activation is None or workload.local_experts < workload.experts:
        return []
    tokens, hidden, columns = workload.tokens, workload.hidden, 2 * workload.intermediate
    gate_up, down = (columns, hidden), (hidden, workload.intermediate)
    if workload.transposed:
        gate_up, down = gate_up[::-1], down[::-1]
    arguments = {
        "hidden_states": ((tokens, hidden), "bfloat16"),
        "top_k_index": workload.top_k_index,
        "top_k_weights": ((tokens, workload.top_k), "float32"),
        "gate_up_proj": ((workload.experts, *gate_up), "bfloat16"),
        "down_proj": ((workload.experts, *down), "bfloat16"),
    }
    static = {"activation": workload.activation, "transposed": workload.transposed}
    return [Call("experts", "layer", arguments, static)]


def examples() -> list[Call]:
    """Small calls, whose results `tpu-kernels check` compares with the reference."""

    def product(part: str, dtype: str, rows: int, k: int, n: int, sizes: list[int], **static: Any) -> Call:
        weights = (len(sizes), *((n, k) if static.get("transpose_rhs") else (k, n)))
        arguments = {"lhs": ((rows, k), dtype), "rhs": (weights, dtype), "group_sizes": sizes}
        if static.pop("biased", False):
            arguments["bias"] = ((len(sizes), n), dtype)
        if dtype == "int8":
            arguments["lhs"] = ((rows, k), "bfloat16")
            arguments["rhs_scale"] = ((len(sizes), n), "float32")
        return Call("ragged_dot", part, arguments, static)

    layer = {
        "hidden_states": ((5, 96), "bfloat16"),
        "top_k_index": [[0, 3], [2, 1], [3, 0], [6, 1], [1, 2]],  # 6 is another rank's expert
        "top_k_weights": ((5, 2), "float32"),
        "gate_up_proj": ((4, 256, 96), "bfloat16"),
        "down_proj": ((4, 96, 128), "bfloat16"),
    }
    gate = {"transpose_rhs": True, "biased": True, "activation": "silu", "gating": "interleaved"}
    return [
        product("sorted", "float32", 24, 100, 72, [5, 0, 12, 3]),
        product("transposed", "bfloat16", 40, 128, 192, [17, 0, 20], transpose_rhs=True),
        product("gated", "float32", 24, 64, 256, [9, 11], **gate),
        product("int8", "int8", 24, 128, 256, [7, 0, 14], transpose_rhs=True),
        Call("experts", "layer", layer, {"activation": "gelu_tanh"}),
        Call("pack_mxfp4", "", {"blocks": ((2, 96, 5, 16), "uint8"), "scales": ((2, 96, 5), "uint8")}, {}),
    ]
