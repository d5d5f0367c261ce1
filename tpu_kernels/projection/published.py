"""Decode steps that others measured and published, to hold projections against."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

from .records import PUBLISHED
from .result import Comparison, Row

PLAN, TPU = "ep8", "v6e-8"
FITTED_BATCH = 1
# Names of the arms here for those in the file.
ARMS = {"grouped_mm": "grouped_mm", "ragged_dot_tpu": PUBLISHED}
# The model in the file by what tells it: model type, layers, hidden size.
_MODELS = {
    ("qwen3_moe", 48, 2048): "Qwen/Qwen3-30B-A3B-Instruct-2507",
    ("gemma4_text", 30, 2816): "google/gemma-4-26B-A4B-it",
}


@functools.cache
def load_published() -> dict[str, Any]:
    """The file, as it was published: source, setup and figures."""
    text = resources.files(__package__).joinpath("published.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def published_steps(config: dict[str, Any]) -> dict[tuple[str, int], float]:
    """Published milliseconds of a step of the model with this config, by arm and batch."""
    key = config.get("model_type"), config.get("num_hidden_layers"), config.get("hidden_size")
    name = _MODELS.get(key)  # type: ignore[arg-type]
    if name is None:
        return {}
    figures = load_published()["decode_step_ms"][name]
    return {
        (arm, batch): figures[theirs][place]
        for theirs, arm in ARMS.items()
        for place, batch in enumerate(figures["batch"])
    }


def compare(config: dict[str, Any], rows: tuple[Row, ...]) -> tuple[Comparison, ...]:
    """The published steps among `rows`, with attention as published."""
    steps = published_steps(config)
    found = []
    for row in rows:
        measured = steps.get((row.arm.experts, row.batch))
        if measured is None or row.not_projected or row.arm.attention != "sdpa":
            continue
        projected = (row.device_ms.low + row.device_ms.high) / 2 + row.host_ms.high
        found.append(
            Comparison(
                arm=row.arm.experts,
                batch=row.batch,
                published_ms=measured,
                projected_ms=projected,
                deviation=projected / measured - 1,
                fitted=row.arm.experts == PUBLISHED and row.batch == FITTED_BATCH,
            )
        )
    return tuple(found)
