from __future__ import annotations

import pytest

from tpu_kernels.analysis.simulator.blocks import find_blocks
from tpu_kernels.analysis.simulator.parser import parse_bundles
from tpu_kernels.errors import SimulationError

from .bundles import PREAMBLE

BRANCH = "%9 = sbr.rel (%p1_p1) target = $region5"
STAYS = "%s2_s2 = smov.u32 (!%p1_p1), 1"
OTHER = "%s3_s3 = smov.u32 2"
EMPTY = ""
TARGET = "TARGET"  # a bundle that the compiler marks
NEXT = [OTHER] * 8


def ends_of_blocks(bundles: list[str], slots: int | None) -> list[int]:
    lines = []
    for place, text in enumerate([OTHER, BRANCH, *bundles, OTHER]):
        label, body = ("PF", OTHER) if text == TARGET else ("  ", text)
        region = " /* Start region 4 */" if text == TARGET else ""
        lines.append(f"  {place:#x} {label}: {{ {body} }}{region}\n")
    schedule = parse_bundles(PREAMBLE + "".join(lines))
    return [block.end for block in find_blocks(schedule, slots)]


@pytest.mark.parametrize(
    ("bundles", "slots"),
    [
        # Six, however they are filled.
        ([*[STAYS] * 6, *NEXT], 6),
        ([OTHER, STAYS, OTHER, OTHER, OTHER, STAYS, *NEXT], 6),
        ([STAYS, EMPTY, EMPTY, STAYS, STAYS, STAYS, *NEXT], 6),
        ([OTHER, EMPTY, OTHER, OTHER, OTHER, OTHER, TARGET, *NEXT], 6),
        ([EMPTY, OTHER, OTHER, OTHER, OTHER, EMPTY, TARGET, *NEXT], 6),
        ([OTHER, *[EMPTY] * 5, *NEXT], 6),
        # One empty bundle for all that would be.
        ([EMPTY, TARGET, *NEXT], 1),
        ([STAYS, EMPTY, TARGET, *NEXT], 2),
        ([STAYS, STAYS, EMPTY, *NEXT], 3),
        ([STAYS, STAYS, STAYS, STAYS, EMPTY, TARGET, *NEXT], 5),
        ([EMPTY, "%8 = sbr.rel (%p7_p7) target = $region6", *[OTHER] * 6, *NEXT], 1),
        ([STAYS, EMPTY, OTHER, OTHER, TARGET, *NEXT], 2),
    ],
)
def test_delay_slots_that_are_not_printed(bundles: list[str], slots: int) -> None:
    assert ends_of_blocks(bundles, None)[0] == 2 + slots


def ends_behind(target: str, slots: list[str], then: str = OTHER) -> list[int]:
    """The ends of blocks where region 5, which the branch leads to, is the bundle `target` further on, and `then`."""
    bundles = [OTHER, BRANCH, *slots, *[OTHER] * 3, f"{target} }} /* Start region 5 */ {{", then]
    text = "".join(f"  {place:#x}   : {{ {body} }}\n" for place, body in enumerate(bundles))
    return [block.end for block in find_blocks(parse_bundles(PREAMBLE + text.replace(" { }", "")), None)]


def test_delay_slots_by_the_values_that_the_branch_leads_to() -> None:
    slots = [EMPTY, EMPTY, "%s7_s4 = smov.u32 1", OTHER, OTHER, OTHER]
    assert ends_behind("%s8_s5 = smov.u32 %s7_s4", slots)[0] == 2 + 6
    assert ends_behind("%s8_s5 = smov.u32 %s6_s4", slots)[0] == 2 + 1
    # Made there, under the predicate of who reads it: it says nothing of what was in the register before.
    made, read = "%s6_s4 = smov.u32 (%p7_p7), 1", "%s8_s5 = smov.u32 (%p7_p7), %s6_s4"
    assert ends_behind(made, slots, read)[0] == 2 + 6


def test_values_that_contradict_each_other_are_an_error() -> None:
    # The first is read behind the branch, so it is run before; the second would replace what is read there.
    slots = [EMPTY, EMPTY, "%s7_s4 = smov.u32 1", "%s9_s6 = smov.u32 1", OTHER, OTHER]
    with pytest.raises(SimulationError, match="cannot be told"):
        ends_behind("%s8_s5 = sadd.s32 %s6_s4, %s9_s6", slots)


def test_delay_slots_behind_a_loop_are_all_that_is_within_it() -> None:
    lines = ["  0x0 LB: > { %s3_s3 = smov.u32 2 } /* Start region 5 */\n", f"  0x1   : > {{ {BRANCH} }}\n"]
    lines += [f"  {place:#x}   : {{}}\n" for place in (2, 3)]
    lines += [f"  {place:#x}   : > {{ {OTHER} }}\n" for place in range(4, 8)]
    lines += [f"  {place:#x}   : {{ {OTHER} }}\n" for place in range(8, 12)]
    blocks = find_blocks(parse_bundles(PREAMBLE + "".join(lines)), None)
    assert blocks[0].end == blocks[1].start == 8


def test_delay_slots_of_a_fixed_number() -> None:
    assert ends_of_blocks([STAYS, TARGET, *NEXT], 4)[0] == 6


def test_a_branch_into_the_slots_of_another_is_an_error() -> None:
    text = "".join(
        f"  {place:#x}   : {{ {body} }}\n"
        for place, body in enumerate([BRANCH, OTHER, OTHER, OTHER, OTHER, OTHER, OTHER])
    ).replace("{ %s3_s3 = smov.u32 2 }", "{ %s3_s3 = smov.u32 2 } /* Start region 5 */", 1)
    with pytest.raises(SimulationError, match="is branched to and delayed behind a branch"):
        find_blocks(parse_bundles(PREAMBLE + text), 4)
