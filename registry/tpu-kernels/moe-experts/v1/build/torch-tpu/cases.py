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
    """

    name: str
    choices: int
    experts: int
    of: int
    hidden: int
    intermediate: int
    form: dict[str, Any] = dataclasses.field(default_factory=dict)
    biased: bool = False

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
    *_spread(Case("gemma-4-26b-a4b", 8, 128, 128, 2816, 704, {"activation": "gelu_tanh"})),
    *_spread(Case("gpt-oss-20b", 4, 32, 32, 2880, 2880, GPT_OSS, biased=True)),
    *_spread(Case("nemotron-3-nano", 6, 128, 128, 2688, 1856, {"gated": False, "activation": "relu2"})),
    *_spread(Case("mixtral-8x7b", 2, 8, 8, 4096, 14336)),
)
TOKENS = (1, 8, 64, 256, 512)
