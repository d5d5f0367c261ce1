"""What the compiled programs of a step show that a kernel, a layout or another plan would save."""

from __future__ import annotations

import re
from collections import defaultdict

from ..analysis.hlo import OVERHEAD, shape_bytes
from ..analysis.simulator.calibration import Calibration
from ..analysis.sizes import format_bytes
from .plan import ParallelPlan
from .records import Answer
from .step import DeviceStep, PartTimes
from .times import OpTime

_LARGE = 2**20  # bytes: smaller copies are noise
_SLOW = 1.5  # times what memory allows
_NOTABLE_MS = 0.1  # a step
_PADDING = 0.05  # of what is needed: less is not worth a word


def findings(
    answer: Answer,
    step: DeviceStep,
    plan: ParallelPlan,
    batch: int,
    host_ms: float,
    calibration: Calibration,
) -> tuple[str, ...]:
    """What to fix in an arm's step, the costliest first."""
    costs: defaultdict[str, float] = defaultdict(float)
    for times, count in step.parts:
        for op in times.ops:
            if text := _of_op(op, times, batch, answer.experts.top_k if answer.experts else 0):
                costs[text] += op.us * count / 1e3
    found = [f"{text}: {ms:.2f} ms a step" for text, ms in sorted(costs.items(), key=lambda each: -each[1])]
    if host_ms * 1e3 > step.expected.high:
        found.insert(
            0, "generate's host part takes longer than the chips do: use a loop that stays on the device"
        )
    if slow := _attention(answer, step, calibration):
        found.append(slow)
    if padded := _padding(answer, step):
        found.append(padded)
    if plan.ep > 1 and plan.tp == 1:
        whole = sum(answer.weights[kind.name][0] * kind.count for kind in answer.layers)
        found.append(
            f"all but the experts is whole on each chip: {format_bytes(whole)} of weights in the layers that every "
            "chip reads each step"
        )
    return tuple(found)


def _of_op(op: OpTime, times: PartTimes, batch: int, top_k: int) -> str | None:
    """What an op does that need not be; None of an op that has to be, or is small."""
    size = shape_bytes(op.shape)
    if not op.us or size < _LARGE or times.part.kind is None:
        return None
    dims = [int(axis) for axis in re.findall(r"\d+", op.shape.partition("[")[2])]
    one_of_cache = times.part.cache_bytes // 2
    if op.place == "experts" and len(dims) == 3 and dims[0] == batch * top_k and "gather" in op.name:
        return f"each pair's expert weights are copied, {op.shape}; a kernel reads them in place"
    if op.kind in OVERHEAD and size == one_of_cache:
        return f"the cache is copied, {op.shape}; donate it and write into it"
    if op.place == "attention" and len(dims) > 3 and size > one_of_cache:
        return f"keys or values are repeated for each query head, {op.shape}; use attention on grouped heads"
    # What has no axis of sequences, or of their pairs, is a weight.
    if op.kind in OVERHEAD and len(dims) == 3 and (batch == 1 or dims[0] % batch) and op.hbm_bytes >= size:
        return f"weights are copied ({op.kind}), {op.shape}; store them in the layout that is read"
    return None


def _attention(answer: Answer, step: DeviceStep, calibration: Calibration) -> str | None:
    """Attention that is not bound by memory, as it is when decoding."""
    needed = sum(
        (answer.weights[times.part.kind][0] + times.part.cache_bytes) * count
        for times, count in step.parts
        if times.part.kind is not None
    )
    takes, could = step.places.get("attention", 0) / 1e3, needed / calibration.memory.attainable_gbps / 1e6
    if takes < max(_SLOW * could, _NOTABLE_MS):
        return None
    return (
        f"attention takes {takes:.1f} ms a step, and its weights, keys and values could be read in {could:.1f} ms: use "
        "tpu_attention"
    )


def _padding(answer: Answer, step: DeviceStep) -> str | None:
    extra = needed = 0
    for times, count in step.parts:
        if times.part.kind is not None and times.report.memory is not None:
            wanted = sum(answer.weights[times.part.kind]) + times.part.cache_bytes
            needed += wanted * count
            extra += (times.report.memory.arguments - wanted) * count
    if extra < _PADDING * needed:
        return None
    return f"tiles pad weights and cache by {extra / needed:.0%}: {format_bytes(extra)} of HBM"
