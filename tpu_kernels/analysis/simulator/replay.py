"""Replays a trace against models of the DMA engine and the matrix units."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...errors import SimulationError
from .blocks import Block
from .ir import Schedule
from .models import DmaModel, MatrixModel
from .trace import Trace


@dataclass(frozen=True, slots=True)
class Transfer:
    """A DMA that was made: cycles of its start, first byte and end, and what it moved."""

    issued: float
    begin: float
    done: float
    size: int
    operand: int | None
    write: bool


@dataclass(frozen=True, slots=True)
class Timing:
    """When a trace does what.

    Attributes:
        cycles: Of the whole kernel.
        issue_cycles: Bundles that were run, one cycle each, and delays of the program's own.
        matrix_cycles: Waiting for the matrix units.
        stall_cycles: Waiting for DMAs.
        steps: When each step of the trace begins.
        transfers: The DMAs, as started.
        stalls: The waits for DMAs: when they begin and how long they take.
    """

    cycles: float
    issue_cycles: float
    matrix_cycles: float
    stall_cycles: float
    steps: np.ndarray
    transfers: list[Transfer]
    stalls: list[tuple[float, float]]


@dataclass(slots=True)
class _Semaphore:
    value: int = 0
    arriving: list[tuple[float, int]] = field(default_factory=list)  # a heap of when and how much


def replay(
    schedule: Schedule,
    blocks: Sequence[Block],
    trace: Trace,
    *,
    dma: DmaModel,
    matrix: MatrixModel,
    granule: int,
) -> Timing:
    """The time that a trace takes.

    Raises:
        SimulationError: The kernel waits for what no DMA or signal will bring: a deadlock.
    """
    waits = [matrix.waits(schedule.bundles, block) for block in blocks]
    lengths = np.array([block.end - block.start for block in blocks])
    waited = np.array([wait[-1] for wait in waits])
    order = np.frombuffer(trace.blocks, dtype=np.uint32)
    costs = (lengths + waited)[order]
    for step, cycles in trace.delays.items():
        costs[step] += cycles
    starts = np.concatenate([[0.0], np.cumsum(costs)])
    begins = starts.tolist()
    semaphores: dict[int, _Semaphore] = {}
    transfers: list[Transfer] = []
    stalls: list[tuple[float, float]] = []
    stalled = 0.0
    moments: list[tuple[int, float]] = []  # steps in which the core stalled, and how long till then
    steps = trace.blocks
    for action, step, offset, address, amount, operand, write in trace.events:
        now = begins[step] + offset + waits[steps[step]][offset] + stalled
        semaphore = semaphores.get(address)
        if semaphore is None:
            semaphore = semaphores[address] = _Semaphore()
        if action == "dma":
            size = amount * granule
            begin, done = dma.start(now, size, hbm=operand is not None)
            heapq.heappush(semaphore.arriving, (done, amount))
            transfers.append(Transfer(now, begin, done, size, operand, write))
        elif action == "signal":
            semaphore.value += amount
        elif action == "reset":
            semaphore.value, semaphore.arriving = amount, []
        else:
            arriving = semaphore.arriving
            end = now
            while semaphore.value < amount or (arriving and arriving[0][0] <= now):
                if not arriving:
                    line = schedule.bundles[blocks[steps[step]].start + offset].line
                    raise SimulationError(
                        f"deadlock: the kernel waits for {amount} on a semaphore that holds {semaphore.value}, with no "
                        f"DMA on its way to it, in line {line} of its bundles"
                    )
                done, more = heapq.heappop(arriving)
                semaphore.value += more
                end = max(end, done)
            if end > now:
                stalls.append((now, end - now))
                stalled += end - now
                moments.append((step, stalled))
    if moments:
        # A step begins later by all the stalls in the steps before it.
        places, sums = zip(*moments, strict=True)
        before = np.searchsorted(np.array(places), np.arange(len(starts)), side="left")
        starts = starts + np.concatenate([[0.0], np.array(sums)])[before]
    issue = float(lengths[order].sum() + sum(trace.delays.values()))
    return Timing(
        cycles=float(starts[-1]),
        issue_cycles=issue,
        matrix_cycles=float(waited[order].sum()),
        stall_cycles=stalled,
        steps=starts,
        transfers=transfers,
        stalls=stalls,
    )
