"""From the times of a step's parts to what is told of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..analysis.simulator.calibration import Calibration
from ..analysis.target import CompileTarget
from .findings import findings
from .plan import ParallelPlan
from .records import PUBLISHED, Answer, Arm
from .result import Range, Ratio, Row
from .routing import Routing, expected_routing, worst_routing
from .step import DeviceStep, PartTimes, device_step
from .terms import load_terms, usable_hbm

OURS = "tpu_fused_experts"


def routings(answer: Answer, batch: int, plan: ParallelPlan) -> tuple[Routing | None, Routing | None]:
    """The expected and the worst routing of a step; None for a model without experts."""
    if answer.experts is None:
        return None, None
    sizes = (batch, answer.experts.top_k, answer.experts.count, plan.ep)
    return expected_routing(*sizes), worst_routing(*sizes)


def make_row(
    answer: Answer,
    arm: Arm,
    batch: int,
    times: Mapping[str, PartTimes | str],
    plan: ParallelPlan,
    target: CompileTarget,
    calibration: Calibration,
) -> Row:
    """An arm's step at a batch size.

    Args:
        answer: What was exported.
        arm, batch: Whose step.
        times: Of the parts, by their file; or why there are none.
        plan: Over chips.
        target: The TPU slice.
        calibration: Of its generation.
    """
    parts = [part.file for part in answer.parts if part.batch == batch and part.arm in (arm, None)]
    reasons = [dict(answer.refused).get(arm), *(why for file in parts if isinstance(why := times[file], str))]
    if reason := next(filter(None, reasons), None):
        return Row(arm=arm, batch=batch, not_projected=reason)
    step = device_step(answer, arm, batch, times, target.generation)
    device = Range(low=step.expected.low / 1e3, high=step.expected.high / 1e3)
    host = _host_ms(answer)
    worst_ms = max(step.worst_us / 1e3, device.high)
    step_ms = Range(low=device.low + host.low, high=worst_ms + host.high)
    return Row(
        arm=arm,
        batch=batch,
        floor_ms=_floor_ms(answer, step, batch, plan, calibration),
        device_ms=device,
        worst_ms=worst_ms,
        host_ms=host,
        step_ms=step_ms,
        tokens_per_s=Range(low=batch / step_ms.high * 1e3, high=batch / step_ms.low * 1e3),
        hbm_bytes=step.hbm_bytes,
        fits=step.hbm_bytes <= usable_hbm(target.generation),
        where={place: us / 1e3 for place, us in sorted(step.places.items(), key=lambda each: -each[1]) if us},
        findings=findings(answer, step, plan, batch, host.high, calibration),
    )


def _host_ms(answer: Answer) -> Range:
    """The host's part of a step: of a loop on the device, and of transformers' generate."""
    host = load_terms().host
    layers = sum(kind.count for kind in answer.layers)
    sliding = any(kind.window is not None for kind in answer.layers)
    # transformers compiles steps over sliding windows anew until torch gives up and runs them op by op.
    per_layer = host.op_by_op_us_per_layer if sliding else host.compiled_us_per_layer
    return Range(low=host.device_loop_us / 1e3, high=max(host.device_loop_us, per_layer * layers) / 1e3)


def _floor_ms(
    answer: Answer, step: DeviceStep, batch: int, plan: ParallelPlan, calibration: Calibration
) -> float:
    expected, _ = routings(answer, batch, plan)
    active = expected.active / expected.local if expected else 0
    needed = float(answer.weights[""][0])
    for times, count in step.parts:
        if times.part.kind is not None:
            others, of_experts = answer.weights[times.part.kind]
            needed += (others + of_experts * active + times.part.cache_bytes) * count
    return needed / calibration.memory.nominal_gbps / 1e6


def make_ratios(rows: tuple[Row, ...], batches: Sequence[int]) -> tuple[Ratio, ...]:
    """Ours to the published kernel, where both are projected."""
    found = []
    for batch in batches:
        arms = {row.arm.experts: row for row in rows if row.batch == batch and not row.not_projected}
        if not {OURS, PUBLISHED} <= arms.keys():
            continue
        ours, theirs = arms[OURS], arms[PUBLISHED]
        found.append(
            Ratio(
                batch=batch,
                device=_ratio(theirs.device_ms, ours.device_ms),
                with_generate=_ratio(theirs.device_ms, ours.device_ms, theirs.host_ms.high),
            )
        )
    return tuple(found)


def _ratio(theirs: Range, ours: Range, both: float = 0.0) -> Range:
    """At either bound: what hides, or does not, does so in both."""
    low, high = sorted(((theirs.low + both) / (ours.low + both), (theirs.high + both) / (ours.high + both)))
    return Range(low=low, high=high)
