"""Models of the units that run beside the core: how long they take, and how long the core waits for them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Protocol

from .blocks import Block
from .calibration import Calibration, Matrix
from .ir import Bundle, MatrixOp


class DmaModel(Protocol):
    """When DMAs are done. They are told of in the order they start in."""

    def start(self, now: float, size: int, *, hbm: bool) -> tuple[float, float]:
        """The cycle from which bytes flow, and that in which the DMA is seen as done."""


class FifoDma:
    """One channel to HBM, which DMAs take in turn; as wide as the share of one of the cores that are `sharing` it."""

    def __init__(self, calibration: Calibration, *, sharing: int = 1) -> None:
        memory, clock = calibration.memory, calibration.clock_ghz
        self._bytes_per_cycle = calibration.bytes_per_cycle / sharing
        self._latency = memory.latency_ns * clock
        self._start = memory.start_ns * clock
        self._local = memory.local_ns * clock
        self._free = 0.0

    def start(self, now: float, size: int, *, hbm: bool) -> tuple[float, float]:
        if not hbm:
            return now, now + self._local
        begin = max(now, self._free)
        self._free = begin + self._start + size / self._bytes_per_cycle
        return begin, self._free + self._latency


class MatrixModel(Protocol):
    """How long the core waits for the matrix units within a block."""

    def waits(self, bundles: Sequence[Bundle], block: Block) -> list[float]:
        """Cycles waited before each bundle of the block, summed up from its begin; and at last those of all."""


class QueuedMatrix:
    """Units that take a multiply at a time and queue some; a pop waits for its result."""

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix

    def waits(self, bundles: Sequence[Bundle], block: Block) -> list[float]:
        state = _Units(self._matrix)
        waited = [0.0]
        for offset, bundle in enumerate(bundles[block.start : block.end]):
            total = waited[-1]
            for op in bundle.matrix:
                total += state.issue(op, offset + total)
            waited.append(total)
        return waited


class _Units:
    """The matrix units' state within a block; each block finds them idle."""

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix
        self._free: dict[int, float] = defaultdict(float)  # when a unit has worked off all it was given
        self._queues: dict[int, deque[float]] = defaultdict(deque)  # when those waiting begin
        self._results: dict[int, deque[float]] = defaultdict(deque)
        self._entries: dict[tuple[int, int], float] = {}

    def issue(self, op: MatrixOp, now: float) -> float:
        """Issues `op` at cycle `now`; the cycles that the core waits for it."""
        matrix, unit = self._matrix, op.unit
        if op.kind == "push":
            if matrix.push_cycles:
                self._free[unit] = max(now, self._free[unit]) + matrix.push_cycles
            return 0.0
        if op.kind == "pop":
            if op.entry is not None:
                ready = self._entries.get((unit, op.entry // 2), 0.0)
            else:
                ready = self._results[unit].popleft() if self._results[unit] else 0.0
            return max(0.0, ready - now)
        queue = self._queues[unit]
        while queue and queue[0] <= now:
            queue.popleft()
        wait = 0.0
        if len(queue) >= matrix.queue:
            wait = queue.popleft() - now
        # Of float32, eight rows a multiply; of bfloat16, sixteen.
        share = 0.5 if op.float32 else 1.0
        begin = max(now + wait, self._free[unit]) + (matrix.latch_cycles if op.latches else 0.0)
        self._free[unit] = begin + matrix.multiply_cycles * share
        queue.append(begin)
        ready = begin + matrix.latency
        results = int(matrix.results * share)
        if op.entry is not None:
            self._entries[unit, op.entry // 2 + (results > 2)] = ready
        else:
            self._results[unit].extend([ready] * results)
        return wait
