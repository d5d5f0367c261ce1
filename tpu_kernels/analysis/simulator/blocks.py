"""From bundles to basic blocks of those scalar instructions that control or a DMA depends on."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ...errors import SimulationError
from .delay import count_slots, find_branches, reads
from .ir import Bundle, Register, ScalarOp, Schedule
from .semantics import SCALAR_OPS


@dataclass(frozen=True, slots=True)
class Block:
    """Bundles that are run one after the other.

    Attributes:
        start, end: The first bundle and the one after the last.
        needed: The instructions of each bundle that matter.
        branch: The branch in it, the only way out but its end.
        target: The block that the branch leads to, by its place.
    """

    start: int
    end: int
    needed: tuple[tuple[ScalarOp, ...], ...]
    branch: ScalarOp | None
    target: int | None


def find_blocks(schedule: Schedule, delay_slots: int | None) -> tuple[Block, ...]:
    """The basic blocks of a kernel, in the order of their bundles.

    Args:
        schedule: The kernel.
        delay_slots: How many bundles after a branch are still run; None: that is told from what follows, as for
            TPU7x.

    Raises:
        SimulationError: Branches that cannot be followed.
    """
    bundles = schedule.bundles
    regions: dict[int, int] = {}
    for place, bundle in enumerate(bundles):
        for region in bundle.starts:
            regions.setdefault(region, place)
    needed = _live(bundles)
    # A region that starts nowhere is the end of the kernel.
    last = len(bundles) - 1
    branches: dict[int, tuple[ScalarOp, int]] = {}  # by the bundle after the delay slots
    leaders = {0, last}
    delayed: set[int] = set()
    for place, bundle in enumerate(bundles):
        found = find_branches(bundle)
        if not found:
            continue
        if len(found) > 1:
            raise SimulationError(f"line {bundle.line} of the kernel's bundles has two branches")
        [branch] = found
        goal = branch.args[0]
        assert isinstance(goal, int)
        slots = delay_slots if delay_slots is not None else count_slots(bundles, place, branch, regions)
        after = place + 1 + slots
        if after in branches:
            raise SimulationError(f"line {bundle.line} of the kernel's bundles branches within a branch")
        branches[after] = branch, regions.get(goal, last)
        leaders |= {after, regions.get(goal, last)}
        delayed.update(range(place + 1, after))
    if delayed & leaders:
        line = bundles[min(delayed & leaders)].line
        raise SimulationError(
            f"line {line} of the kernel's bundles is branched to and delayed behind a branch"
        )
    starts = sorted(place for place in leaders if place < len(bundles))
    places = {start: place for place, start in enumerate(starts)}
    blocks = []
    for start, end in zip(starts, [*starts[1:], len(bundles)], strict=True):
        leaving = branches.get(end)
        blocks.append(
            Block(
                start,
                end,
                tuple(needed[start:end]),
                leaving and leaving[0],
                leaving and places[leaving[1]],
            )
        )
    return tuple(blocks)


def _live(bundles: tuple[Bundle, ...]) -> list[tuple[ScalarOp, ...]]:
    """Each bundle's instructions without those whose results nothing needs, whatever the way to them."""
    definitions: dict[str, list[ScalarOp]] = defaultdict(list)
    waiting: list[Register] = []
    for bundle in bundles:
        for op in bundle.scalar:
            if SCALAR_OPS[op.op] in ("set", "phi"):
                if op.dest is not None:
                    definitions[op.dest.virtual].append(op)
            else:
                waiting += reads(op)
    live: set[str] = set()
    while waiting:
        register = waiting.pop()
        if register.virtual not in live:
            live.add(register.virtual)
            for op in definitions[register.virtual]:
                waiting += reads(op)

    def matters(op: ScalarOp) -> bool:
        effect = SCALAR_OPS[op.op]
        # A phi joins values that are in one register already; so may a cast be.
        if op.op.startswith("int_to_ptr") and isinstance(op.args[0], Register) and op.dest is not None:
            return op.dest.physical != op.args[0].physical and op.dest.virtual in live
        return effect != "phi" and (effect != "set" or (op.dest is not None and op.dest.virtual in live))

    return [tuple(op for op in bundle.scalar if matters(op)) for bundle in bundles]
