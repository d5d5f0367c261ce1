"""From bundles to basic blocks of those scalar instructions that control or a DMA depends on."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass

from ...errors import SimulationError
from .ir import Address, Bundle, Register, ScalarOp, Schedule
from .semantics import SCALAR_OPS

_MOST_SLOTS = 6  # where they are not a fixed number


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
        delay_slots: How many bundles after a branch are still run; None: that is told by where the next region
            begins, which is how TPU7x has it.

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
        found = _branches(bundle)
        if not found:
            continue
        if len(found) > 1:
            raise SimulationError(f"line {bundle.line} of the kernel's bundles has two branches")
        [branch] = found
        goal = branch.args[0]
        assert isinstance(goal, int)
        after = place + 1 + _delay(bundles, place, branch, delay_slots)
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


def _delay(bundles: tuple[Bundle, ...], place: int, branch: ScalarOp, slots: int | None) -> int:
    """How many bundles after the one at `place` are run before its branch takes effect."""
    if slots is not None:
        return slots
    # There are six. Where the last ones would be empty there are fewer, with one empty bundle for the rest. It is
    # known from an empty one between others by what follows: a region or a branch; or what is under no predicate
    # after instructions of the next region, which are under the one that the branch is not taken under.
    stays = None
    if branch.guard is not None:
        stays = dataclasses.replace(branch.guard, negated=not branch.guard.negated)
    near = bundles[place + 1 : place + 2 + _MOST_SLOTS]
    marked = any(bundle.starts or bundle.labelled for bundle in near)
    for count, bundle in enumerate(near):
        if count == _MOST_SLOTS or bundle.starts or bundle.labelled or _branches(bundle):
            return count
        hoisted = near[:count]
        if hoisted and not hoisted[-1].guards and not bundle.guards <= {stays}:
            of_next_region = all(slot.guards <= {stays} for slot in hoisted)
            if of_next_region and (any(slot.guards for slot in hoisted) or not marked):
                return count
    return len(near)


def _branches(bundle: Bundle) -> list[ScalarOp]:
    return [op for op in bundle.scalar if SCALAR_OPS[op.op] == "branch"]


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
                waiting += _reads(op)
    live: set[str] = set()
    while waiting:
        register = waiting.pop()
        if register.virtual not in live:
            live.add(register.virtual)
            for op in definitions[register.virtual]:
                waiting += _reads(op)

    def matters(op: ScalarOp) -> bool:
        effect = SCALAR_OPS[op.op]
        # A phi joins values that are in one register already; so may a cast be.
        if op.op.startswith("int_to_ptr") and isinstance(op.args[0], Register) and op.dest is not None:
            return op.dest.physical != op.args[0].physical and op.dest.virtual in live
        return effect != "phi" and (effect != "set" or (op.dest is not None and op.dest.virtual in live))

    return [tuple(op for op in bundle.scalar if matters(op)) for bundle in bundles]


def _reads(op: ScalarOp) -> list[Register]:
    read: list[Register] = [register for register in (op.guard, op.old) if register is not None]
    for argument in op.args:
        terms = argument.terms if isinstance(argument, Address) else (argument,)
        read += [term for term in terms if isinstance(term, Register)]
    return [dataclasses.replace(register, negated=False) for register in read]
