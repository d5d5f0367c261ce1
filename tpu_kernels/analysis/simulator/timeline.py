"""What happens when, as a trace that Perfetto and chrome://tracing show."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .kernel import KernelRun

_MOST_ITERATIONS = 20_000  # of a loop; of one with more, only its begin and end are drawn


@dataclass(frozen=True)
class Span:
    """Something that takes time.

    Attributes:
        track: The line that it is drawn on.
        name: What it is.
        start_us, duration_us: When, in microseconds since the begin of the first kernel.
        details: Shown when it is selected.
    """

    track: str
    name: str
    start_us: float
    duration_us: float
    details: Mapping[str, Any] = field(default_factory=dict)


def kernel_spans(
    name: str, run: KernelRun, names: Sequence[str], *, start_us: float, clock_ghz: float
) -> list[Span]:
    """A run of a kernel: itself, its loops, its DMAs and its waits for them.

    Args:
        name: The kernel's.
        run: The run.
        names: Of the operands and results.
        start_us: When it begins.
        clock_ghz: Of the core.
    """
    scale = 1e-3 / clock_ghz
    timing = run.timing

    def span(track: str, title: str, begin: float, end: float, **details: Any) -> Span:
        return Span(track, title, start_us + begin * scale, (end - begin) * scale, details)

    spans = [span("kernel", name, 0.0, timing.cycles)]
    spans += [span(f"loop {depth}", title, begin, end) for depth, title, begin, end in _loops(run)]
    spans += [span("waiting for DMA", "wait", begin, begin + cycles) for begin, cycles in timing.stalls]
    for transfer in timing.transfers:
        if transfer.operand is None:
            continue
        track = "DMA to HBM" if transfer.write else "DMA from HBM"
        spans.append(
            span(
                track,
                names[transfer.operand],
                transfer.issued,
                transfer.done,
                bytes=transfer.size,
                queued_us=(transfer.begin - transfer.issued) * scale,
            )
        )
    return spans


def chrome_trace(title: str, spans: Iterable[Span]) -> str:
    """The spans in Chrome's trace format, as JSON."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": title}}]
    tracks: dict[str, int] = {}
    for number, span in enumerate(spans):
        if span.track not in tracks:
            tracks[span.track] = len(tracks) + 1
            events.append(
                {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": 1,
                    "tid": tracks[span.track],
                    "args": {"name": span.track},
                }
            )
        common = {"name": span.name, "pid": 1, "tid": tracks[span.track], "ts": span.start_us}
        if span.track.startswith("DMA"):
            # DMAs overlap, which only asynchronous events may.
            asynchronous = {"cat": span.track, "id": number}
            events.append({"ph": "b", **common, **asynchronous, "args": dict(span.details)})
            events.append({"ph": "e", **common, **asynchronous, "ts": span.start_us + span.duration_us})
        else:
            events.append({"ph": "X", **common, "dur": span.duration_us, "args": dict(span.details)})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})


def _loops(run: KernelRun) -> Iterator[tuple[int, str, float, float]]:
    """Depth, title, begin and end (in cycles) of the iterations of all loops."""
    blocks, bundles = run.kernel.blocks, run.kernel.schedule.bundles
    order = np.frombuffer(run.trace.blocks, np.uint32)
    begins = run.timing.steps
    tails: dict[int, int] = {}
    for place, block in enumerate(blocks):
        if block.target is not None and block.target <= place:
            tails[block.target] = max(place, tails.get(block.target, 0))
    for head, tail in tails.items():
        inside = (order >= head) & (order <= tail)
        starts = np.flatnonzero(order == head)
        left = np.flatnonzero(inside[:-1] & ~inside[1:]) + 1
        ends = np.append(left, len(order))
        depth = bundles[blocks[head].start].depth
        title = f"loop at line {bundles[blocks[head].start].line}"
        if len(starts) > _MOST_ITERATIONS:
            if len(starts):
                yield depth, title, float(begins[starts[0]]), float(begins[ends[-1]])
            continue
        for place, start in enumerate(starts):
            end = ends[np.searchsorted(ends, start, side="right")]
            if place + 1 < len(starts):
                end = min(end, starts[place + 1])
            yield depth, title, float(begins[start]), float(begins[end])
