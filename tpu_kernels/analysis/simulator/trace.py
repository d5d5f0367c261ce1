"""What a kernel does, in order, free of timing: which blocks run, and what they do to DMAs and semaphores.

Waits never change the way through a kernel, so that one trace serves every model of the time it takes.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Literal, NamedTuple

Action = Literal["dma", "signal", "reset", "wait"]


class Event(NamedTuple):
    """Something that takes or gives time.

    Attributes:
        action: `dma` starts one; `signal` adds to a semaphore; `reset` sets it; `wait` waits till it holds at
            least as much.
        step: Place of the block that does it, in the order of running.
        offset: Bundle within the block.
        semaphore: Its address.
        amount: What is added, set or waited for; of a DMA the granules it moves, which it adds when done.
        operand: Whose memory a DMA reads or writes; None if none in HBM.
        write: The DMA writes to HBM.
    """

    action: Action
    step: int
    offset: int
    semaphore: int
    amount: int
    operand: int | None = None
    write: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """The run of a kernel.

    Attributes:
        blocks: The blocks' numbers in the order they were run in.
        events: In that order too.
        delays: Cycles that a step waits by its own program, by step.
    """

    blocks: array[int]
    events: list[Event]
    delays: dict[int, int]
