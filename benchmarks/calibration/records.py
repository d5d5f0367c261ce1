"""The recorded times, and which of them are for fitting and which for checking."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("tpu_timings.jsonl")

GENERATIONS = {"tpu_v5_lite": "v5e", "tpu_v5": "v5p", "tpu_v6_lite": "v6e", "tpu7x": "tpu7x"}
FAMILIES = {
    "pallas_mosaic_tpu_ragged_dot": "grouped matmul v1",
    "pallas_mosaic_tpu_v2_ragged_dot": "grouped matmul v2",
    "pallas_mosaic_tpu_splash_attention": "splash attention",
    "pallas_mosaic_tpu_splash_attention_vjp": "splash attention gradient",
}
_BYTES = {"bf16": 2, "f32": 4, "s8": 1, "int8": 1, "f8e4m3fn": 1}


@dataclasses.dataclass(frozen=True)
class Record:
    """One kernel's time on a real TPU.

    Attributes:
        generation: v5e, v5p, v6e or tpu7x.
        op: tokamax's name of the kernel.
        arguments, config: What it was called with.
        median_ms: The device's time, with that of XLA ops beside the kernel.
    """

    generation: str
    op: str
    arguments: dict[str, Any]
    config: dict[str, Any]
    median_ms: float

    @property
    def family(self) -> str:
        return FAMILIES[self.op]

    @property
    def plain(self) -> bool:
        """Whether it is without quantised operands, dropout and gradients of attention, which are out of range."""
        arguments = self.arguments
        if "lhs" in arguments:
            return isinstance(arguments["lhs"], str) and isinstance(arguments["rhs"], str)
        return self.op == "pallas_mosaic_tpu_splash_attention" and not arguments["dropout_rate"]

    @property
    def shape(self) -> str:
        """Names the problem, whatever the configuration it was solved with."""
        arguments = {name: value for name, value in self.arguments.items() if name != "return_residuals"}
        return json.dumps(arguments, sort_keys=True)

    @property
    def key(self) -> str:
        """Names the record."""
        text = json.dumps([self.generation, self.op, self.arguments, self.config], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def fitted(self) -> bool:
        """Whether it is in the half that constants are fitted on: by problem, so that none is in both halves."""
        return hashlib.sha256(self.shape.encode()).digest()[0] % 2 == 0

    def roofline_ms(self, *, peak_tflops: float, gbps: float) -> float:
        """The larger of flops over peak and operands' bytes over bandwidth."""
        return max(self._flops() / peak_tflops / 1e9, self._bytes() / gbps / 1e6)

    def _flops(self) -> float:
        if "lhs" in self.arguments:
            (_, lhs), (_, rhs) = (parse_shape(self.arguments[name]) for name in ("lhs", "rhs"))
            rows = sum(self.group_sizes())
            if len(rhs) == 2:
                return 2.0 * rows * lhs[1] * rhs[1]
            return 2.0 * rows * rhs[1] * rhs[2]
        (_, q), (_, k) = (parse_shape(self.arguments[name]) for name in ("q", "k"))
        pairs = q[1] * k[1]
        if self.arguments["mask"]["is_causal"]:
            pairs -= min(q[1], k[1]) * (min(q[1], k[1]) - 1) // 2 + max(0, k[1] - q[1]) * q[1]
        products = 2 if self.op == "pallas_mosaic_tpu_splash_attention" else 5
        return 2.0 * products * q[0] * pairs * q[2]

    def _bytes(self) -> float:
        moved = sum(_size(text) for text in _shapes(self.arguments))
        if "lhs" not in self.arguments:
            results = ["q"] if self.op == "pallas_mosaic_tpu_splash_attention" else ["q", "k", "v"]
            return moved + sum(_size(self.arguments[name]) for name in results)
        (kind, lhs), (_, rhs) = (parse_shape(self.arguments[name]) for name in ("lhs", "rhs"))
        width = _BYTES[kind]
        if len(rhs) == 2:
            return moved + len(self.group_sizes()) * lhs[1] * rhs[1] * width
        # Of the weights, those of groups without rows are not needed.
        used = sum(1 for size in self.group_sizes() if size)
        contracted = self.arguments["ragged_dot_dimension_numbers"]["dot_dimension_numbers"][0][1][0]
        columns = rhs[2] if contracted == 1 else rhs[1]
        return moved - (rhs[0] - used) * rhs[1] * rhs[2] * width + lhs[0] * columns * width

    def group_sizes(self) -> list[int]:
        """Rows of each group; as tokamax draws them where only their sum is recorded."""
        recorded = self.arguments["group_sizes"]
        if isinstance(recorded, list):
            return recorded
        import numpy as np

        groups, rows = recorded["num_groups"], recorded["total_size"]
        drawn = np.random.default_rng(0).choice(groups, rows, replace=True)
        return [int(size) for size in np.bincount(drawn, minlength=groups)]


def load_records(path: Path = FILE) -> list[Record]:
    """The records of kernels that can be simulated, in the order of the file."""
    records = []
    for line in path.read_text().splitlines():
        values = json.loads(line)
        if values["op"] in FAMILIES:
            generation = GENERATIONS[values["device"]]
            records.append(
                Record(generation, values["op"], values["args"], values["config"], values["median_ms"])
            )
    return records


def select(records: Iterable[Record], counts: dict[tuple[str, str], int]) -> list[Record]:
    """The first records of each family and generation, in an order that their content alone gives.

    Problems that were solved with several configurations come first: they tell about ranking.
    """
    records = list(records)
    configurations = defaultdict(set)
    for record in records:
        configurations[record.generation, record.op, record.shape].add(json.dumps(record.config))

    def order(record: Record) -> tuple[bool, str, str]:
        several = len(configurations[record.generation, record.op, record.shape]) > 1
        return not several, hashlib.sha256(record.shape.encode()).hexdigest(), record.key

    chosen = []
    for (generation, family), count in counts.items():
        those = [r for r in records if (r.generation, r.family) == (generation, family)]
        chosen += sorted(those, key=order)[:count]
    return chosen


def parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Dtype and axes of an array as recorded, e.g. `bf16[8,128]`."""
    match = re.fullmatch(r"(\w+)\[([\d,]*)\]", text)
    if match is None:
        raise ValueError(f"no shape: {text!r}")
    return match[1], tuple(int(axis) for axis in match[2].split(",") if axis)


def _shapes(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value] if re.fullmatch(r"\w+\[[\d,]*\]", value) else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [shape for item in items for shape in _shapes(item)]


def _size(text: str) -> int:
    kind, axes = parse_shape(text)
    return math.prod(axes) * _BYTES[kind]
