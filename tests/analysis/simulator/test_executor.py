from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_kernels.errors import SimulationError

from .bundles import SUM, follow, scalar

WAIT_FOR = "%9 = dma.done.wait [#allocation9], %s3_s3"


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=50))
@settings(max_examples=30, deadline=None)
def test_follows_a_loop_that_its_data_bound(words: list[int]) -> None:
    words = [len(words), *words]
    trace = follow(SUM, {0: tuple(words + [0] * (128 - len(words)))})
    assert list(trace.blocks).count(1) == len(words) - 1
    [load, store] = [event for event in trace.events if event.action == "dma"]
    assert (load.operand, load.write, load.amount) == (0, False, 16)
    assert (store.operand, store.write) == (1, True)
    # (The sum begins with the first word, and the loop goes round at least once.)
    assert store.amount == sum(words[: len(words) - 1])


def test_a_strided_dma_that_does_not_say_where_it_goes_is_told_by_its_addresses() -> None:
    general = SUM.replace("dma.vmem_to_hbm [thread:$0] ", "dma.general")
    words = (2, 5, *[0] * 126)
    assert follow(general, {0: words}).events == follow(SUM, {0: words}).events


def test_an_integer_that_control_needs_and_nobody_gave_is_named() -> None:
    with pytest.raises(SimulationError, match=r"depends on the integers of operand 0.*give them with data="):
        follow(SUM)


def test_a_branch_on_a_value_of_the_vector_unit_is_an_error() -> None:
    text = scalar(
        "%1 = vpush %v1_v1",
        "%s2_s2 = spop %1",
        "%p3_p3 = scmp.gt.s32.totalorder %s2_s2, 0",
        "%4 = sbr.rel (%p3_p3) target = $region9",
        *[""] * 5,
    )
    with pytest.raises(SimulationError, match="depends on a value that the vector unit computes"):
        follow(text)


def test_what_is_under_a_false_predicate_may_be_nonsense() -> None:
    operand = "%s1_s1 = inlined_call_operand.hbm [shape: s32[128], index: 0, kind: input, shape index: {}]"
    nonsense = (
        "%s3_s3 = smul.u32 (%p2_p2), %s1_s1, 3  ;;  %p4_p2 = scmp.lt.s32.totalorder (%p2_p2), %s1_s1, 3"
    )
    trace = follow(
        scalar(operand, "%s3_s3 = smov.u32 7", "%p2_p2 = scmp.lt.s32.totalorder 2, 1", nonsense, WAIT_FOR)
    )
    assert trace.events[-1].amount == 7


def test_an_unknown_value_that_nothing_depends_on_does_no_harm() -> None:
    trace = follow(scalar("%s2_s2 = spop %1", "%3 = sst [smem:[#allocation1]] %s2_s2"))
    assert list(trace.blocks) == [0, 1]


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("sadd.s32 2147483647, 1", -(2**31)),
        ("smul.u32 65536, 65537", 65536),
        ("smulhi.u32 4294967295, 4294967295", -2),
        ("sshrl.u32 4294967295, 28", 15),
        ("sshra.s32 4294967295, 28", -1),
        ("sshll.u32 3, 31", -(2**31)),
        ("smin.u32 4294967295, 5", 5),
        ("smin.s32 4294967295, 5", -1),
        ("sand.u32 4294967295, 255", 255),
    ],
)
def test_arithmetic_is_of_32_bits(instruction: str, expected: int) -> None:
    trace = follow(scalar(f"%s3_s3 = {instruction}", WAIT_FOR))
    assert trace.events[0].amount == expected


def test_reads_come_before_writes_within_a_bundle() -> None:
    swap = "%s3_s3 = smov.u32 %s4_s4  ;;  %s4_s4 = smov.u32 %s3_s3"
    trace = follow(scalar("%s3_s3 = smov.u32 1  ;;  %s4_s4 = smov.u32 2", swap, WAIT_FOR))
    assert trace.events[0].amount == 2
    load_and_store = "%s3_s3 = sld [smem:[#allocation1]]  ;;  %8 = sst [smem:[#allocation1]] 6"
    trace = follow(scalar("%7 = sst [smem:[#allocation1]] 5", load_and_store, WAIT_FOR))
    assert trace.events[0].amount == 5


@pytest.mark.parametrize(("limit", "expected"), [(1, 5), (-1, 6)])
def test_opposite_guards_write_one_register(limit: int, expected: int) -> None:
    moves = "%s3_s3 = smov.u32 (%p1_p1, %s0_s3), 5  ;;  %s2_s3 = smov.u32 (!%p1_p1, %s0_s3), 6"
    trace = follow(
        scalar(
            f"%p1_p1 = scmp.lt.s32.totalorder 0, {limit & 0xFFFFFFFF}",
            moves,
            WAIT_FOR + "  ;;  %10 = dma.done.wait [#allocation9], %s2_s3",
        )
    )
    assert trace.events[0].amount == expected


def test_scalar_memory_that_nothing_wrote_is_unknown() -> None:
    with pytest.raises(SimulationError, match="scalar memory that nothing was written to"):
        follow(scalar("%s3_s3 = sld [smem:[#allocation1]]", WAIT_FOR))


def test_part_of_an_operand_is_copied_from_where_its_address_says() -> None:
    text = scalar(
        "%s1_s0 = inlined_call_operand.hbm [shape: s32[128], index: 0, kind: input, shape index: {}]",
        "%s2_s2 = scalar_lea.hbm %s1_s0, 2",
        "%3 = dma.hbm_to_smem %s2_s2, 1, [#allocation1], [#allocation2]",
        "%s3_s3 = sld [smem:[#allocation1 + $0x3]]",
        WAIT_FOR,
    )
    assert follow(text, {0: tuple(range(128))}).events[-1].amount == 2 * 8 + 3
