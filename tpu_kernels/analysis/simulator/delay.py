"""How many bundles after a branch are still run, where the compiler does not print it: on TPU7x.

There are six. Where the last ones would be empty there are fewer, with one empty bundle for the rest: so an empty
bundle may be the last one, or one between others. What tells them apart, surest first: where the next region begins;
loops; whose value a register holds where the branch leads to; and predicates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ...errors import SimulationError
from .ir import Address, Bundle, Register, ScalarOp
from .semantics import SCALAR_OPS

_MOST_SLOTS = 6
_FAR = 600  # bundles from the branch's target on that are looked at


def find_branches(bundle: Bundle) -> list[ScalarOp]:
    """The branches in a bundle."""
    return [op for op in bundle.scalar if SCALAR_OPS[op.op] == "branch"]


def reads(op: ScalarOp) -> list[Register]:
    """The registers that an instruction reads."""
    read: list[Register] = [register for register in (op.guard, op.old) if register is not None]
    for argument in op.args:
        terms = argument.terms if isinstance(argument, Address) else (argument,)
        read += [term for term in terms if isinstance(term, Register)]
    return [dataclasses.replace(register, negated=False) for register in read]


def count_slots(bundles: Sequence[Bundle], place: int, branch: ScalarOp, regions: Mapping[int, int]) -> int:
    """How many bundles after the one at `place` are run before its branch takes effect.

    Args:
        bundles: The kernel's.
        place: Of the branch.
        branch: In it.
        regions: The first bundle of each region.

    Raises:
        SimulationError: What tells it contradicts itself.
    """
    near = bundles[place + 1 : place + 1 + _MOST_SLOTS]
    most = next((n for n, bundle in enumerate(near) if _begins(bundle)), len(near))
    possible = [n for n in range(1, most + 1) if n == _MOST_SLOTS or _may_end(near, n)] or [most]
    [goal] = branch.args
    assert isinstance(goal, int)
    target = regions.get(goal, len(bundles) - 1)
    if len(possible) > 1 and target <= place:
        depth = bundles[target].depth
        # A loop is left only behind what is in it.
        within = max((n for n, bundle in enumerate(near[:most], 1) if bundle.depth >= depth), default=0)
        # And what is behind it and has an effect is not run in each of its passes.
        behind = next((n for n, bundle in enumerate(near[within:most], within) if _acts(bundle)), most)
        possible = [n for n in possible if within <= n <= behind] or [most]
    if len(possible) > 1:
        possible = _by_values(bundles, near, target, branch, regions, possible)
    if not possible:
        raise SimulationError(
            f"how many bundles are run after the branch in line {bundles[place].line} cannot be told: what is read "
            f"behind it contradicts itself"
        )
    return _by_predicates(near, branch, possible)


def _begins(bundle: Bundle) -> bool:
    """Whether a bundle cannot be in a delay slot."""
    return bool(bundle.starts or bundle.labelled or find_branches(bundle))


def _acts(bundle: Bundle) -> bool:
    """Whether a bundle does more than compute, under no predicate."""
    return any(op.guard is None and SCALAR_OPS[op.op] not in ("set", "phi") for op in bundle.scalar)


def _may_end(near: Sequence[Bundle], count: int) -> bool:
    """Whether the last of `count` bundles may stand for empty ones: it is, and the one before is not."""
    return not near[count - 1].guards and (count == 1 or bool(near[count - 2].guards))


def _by_values(
    bundles: Sequence[Bundle],
    near: Sequence[Bundle],
    target: int,
    branch: ScalarOp,
    regions: Mapping[int, int],
    possible: list[int],
) -> list[int]:
    """Those of the possible numbers that go with the values that are read where the branch leads to."""
    for place, bundle in enumerate(near[: possible[-1]]):
        for op in bundle.scalar:
            if op.dest is None or SCALAR_OPS[op.op] == "phi" or (op.guard and op.guard == _stays(branch)):
                continue
            read = _next_read(bundles, target, op.dest.physical, regions)
            if read is None:
                continue
            if op.dest.virtual in read:
                possible = [n for n in possible if n > place]
            elif op.guard is None:
                possible = [n for n in possible if n <= place]
    return possible


def _next_read(
    bundles: Sequence[Bundle], start: int, register: str, regions: Mapping[int, int]
) -> set[str] | None:
    """The values, any of them, that the first instruction from `start` on to read a register takes from it.

    None where it is written first, or where there is no such instruction near. What is written on the way under a
    predicate is not one of them: who reads it is under that predicate, too.
    """
    waiting = [start]
    seen: set[int] = set()
    made: set[str] = set()
    while waiting and len(seen) < _FAR:
        place = waiting.pop(0)
        if place in seen or place >= len(bundles):
            continue
        seen.add(place)
        written = False
        joins = [op for op in bundles[place].scalar if SCALAR_OPS[op.op] == "phi"]
        others = [op for op in bundles[place].scalar if SCALAR_OPS[op.op] != "phi"]
        # What joins values is no instruction: the others read the joint one.
        for ops in (joins, others):
            for op in ops:
                found = {read.virtual for read in reads(op) if read.physical == register}
                if found and not found & made:
                    return found
            for op in ops:
                if op.dest is not None and op.dest.physical == register:
                    made.add(op.dest.virtual)
                    written |= op.guard is None
        if written:
            continue
        for branch in find_branches(bundles[place]):
            goal = branch.args[0]
            if isinstance(goal, int) and goal in regions:
                waiting.append(regions[goal])
        waiting.append(place + 1)
    return None


def _by_predicates(near: Sequence[Bundle], branch: ScalarOp, possible: list[int]) -> int:
    """The most that is possible; fewer where what follows seems to be of the next region.

    That is under no predicate, and behind instructions that are under the one that the branch is not taken under.
    """
    stays = _stays(branch)
    for count in possible[:-1]:
        hoisted = [bundle.guards for bundle in near[:count] if bundle.guards]
        if hoisted and all(guards <= {stays} for guards in hoisted) and not near[count].guards <= {stays}:
            return count
    return possible[-1]


def _stays(branch: ScalarOp) -> Register | None:
    """The predicate under which a branch is not taken."""
    return branch.guard and dataclasses.replace(branch.guard, negated=not branch.guard.negated)
