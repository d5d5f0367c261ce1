"""Named cases: the shapes of real models, shared by tests, benchmarks and tuning."""

from __future__ import annotations

import dataclasses


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
