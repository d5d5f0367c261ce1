"""Named cases: the layers of real models, shared by tests, benchmarks and tuning."""

from __future__ import annotations

import dataclasses
from typing import Any

GPT_OSS: dict[str, Any] = {
    "transposed": True,
    "interleaved": True,
    "alpha": 1.702,
    "limit": 7.0,
    "up_offset": 1.0,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """The experts of one layer of a model, all of them or the share of one rank.

    Attributes:
      name: model, and how its experts are spread.
      choices: k, experts a token.
      experts: E, those that are here.
      of: those of the whole layer.
      hidden, intermediate: H and I; under tensor parallelism the rank's share of I.
      form: what `fused_experts` is told of the model by keyword.
      biased: the experts have biases.
      shared: there is a shared expert, as large as the others.
    """

    name: str
    choices: int
    experts: int
    of: int
    hidden: int
    intermediate: int
    form: dict[str, Any] = dataclasses.field(default_factory=dict)
    biased: bool = False
    shared: bool = False

    @property
    def rows(self) -> int:
        """U: columns of the first product."""
        return self.intermediate * (2 if self.form.get("gated", True) else 1)


def _spread(case: Case) -> list[Case]:
    """A layer on one chip, and one rank's part of it with expert parallelism over 8."""
    rank = dataclasses.replace(case, name=f"{case.name}-ep8", experts=case.experts // 8)
    return [case, rank]


# From the models' published configurations.
CASES: tuple[Case, ...] = (
    *_spread(Case("qwen3-30b-a3b", 8, 128, 128, 2048, 768)),
    *_spread(Case("qwen3.5-35b-a3b", 8, 256, 256, 2048, 512)),
    Case("qwen3.5-35b-a3b-shared", 8, 256, 256, 2048, 512, shared=True),
    *_spread(Case("gemma-4-26b-a4b", 8, 128, 128, 2816, 704, {"activation": "gelu_tanh"})),
    *_spread(Case("gpt-oss-20b", 4, 32, 32, 2880, 2880, GPT_OSS, biased=True)),
    *_spread(Case("nemotron-3-nano", 6, 128, 128, 2688, 1856, {"gated": False, "activation": "relu2"})),
    *_spread(Case("mixtral-8x7b", 2, 8, 8, 4096, 14336)),
)
TOKENS = (1, 8, 64, 256, 512)


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
    """A model's experts layer in bf16, as one call, for `tpu-kernels compile` and `simulate`.

    Args:
      workload: the layer's sizes and routing: `model`, `tokens`, `hidden`, `intermediate`, `local_experts`, `top_k`,
        `top_k_index`, `transposed` and `activation`, as in `tpu_kernels.analysis`.
    """
    experts, hidden, inner = workload.local_experts, workload.hidden, workload.intermediate
    into, back = (2 * inner, hidden), (hidden, inner)
    if workload.transposed:
        into, back = into[::-1], back[::-1]
    arguments: dict[str, Any] = {
        "hidden_states": ((workload.tokens, hidden), "bfloat16"),
        # Those of other chips count from the number of experts on.
        "top_k_index": workload.top_k_index,
        "top_k_weights": ((workload.tokens, workload.top_k), "float32"),
        "gate_up_proj": ((experts, *into), "bfloat16"),
        "down_proj": ((experts, *back), "bfloat16"),
    }
    if workload.model.startswith("gpt-oss"):
        arguments["gate_up_bias"] = ((experts, 2 * inner), "bfloat16")
        arguments["down_bias"] = ((experts, hidden), "bfloat16")
        return [Call("fused_experts", "", arguments, GPT_OSS)]
    if workload.activation is None:
        return []
    form = {"activation": workload.activation, "transposed": workload.transposed}
    return [Call("fused_experts", "", arguments, form)]


def examples() -> list[Call]:
    """Small calls, whose results `tpu-kernels check` compares with the reference."""

    def layer(part: str, dtype: str, index: list[list[int]], case: Case) -> Call:
        experts, hidden, inner = case.experts, case.hidden, case.intermediate
        into, back = (case.rows, hidden), (hidden, inner)
        if case.form.get("transposed"):
            into, back = into[::-1], back[::-1]
        arguments: dict[str, Any] = {
            "hidden_states": ((len(index), hidden), dtype),
            "top_k_index": index,
            "top_k_weights": ((len(index), len(index[0])), "float32"),
            "gate_up_proj": ((experts, *into), dtype),
            "down_proj": ((experts, *back), dtype),
        }
        if dtype == "int8":
            arguments["hidden_states"] = ((len(index), hidden), "bfloat16")
            arguments["gate_up_scale"] = ((experts, case.rows), "float32")
            arguments["down_scale"] = ((experts, hidden), "float32")
        if case.biased:
            arguments["gate_up_bias"] = ((experts, case.rows), dtype)
            arguments["down_bias"] = ((experts, hidden), dtype)
        if case.shared:
            arguments["shared_gate_up"] = (into, dtype)
            arguments["shared_down"] = (back, dtype)
            arguments["shared_weights"] = ((len(index),), "float32")
        return Call("fused_experts", part, arguments, case.form)

    plain = {"gated": False, "activation": "relu2"}
    return [
        layer("gated", "float32", [[0, 3], [2, 1], [3, 0], [0, 2], [1, 2]], Case("", 2, 4, 4, 128, 256)),
        # 7 is another rank's expert.
        layer("plain", "bfloat16", [[1, 7], [7, 2], [2, 0]], Case("", 2, 6, 8, 256, 128, plain)),
        layer("gpt-oss", "bfloat16", [[0], [4], [1], [4]], Case("", 1, 5, 5, 128, 256, GPT_OSS, biased=True)),
        layer("shared", "bfloat16", [[0, 3], [2, 4]], Case("", 2, 4, 8, 128, 128, shared=True)),
        layer("int8", "int8", [[3, 0], [1, 3]], Case("", 2, 4, 4, 256, 128)),
        Call("pack_mxfp4", "", {"blocks": ((2, 96, 5, 16), "uint8"), "scales": ((2, 96, 5), "uint8")}, {}),
    ]
