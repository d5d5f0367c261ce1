from __future__ import annotations

import pytest

from tpu_kernels.analysis.simulator.ir import Address, Register, Symbol
from tpu_kernels.analysis.simulator.parser import parse_bundles
from tpu_kernels.errors import SimulationError

from .bundles import PREAMBLE, SUM, scalar


def test_reads_operands_registers_and_regions() -> None:
    schedule = parse_bundles(PREAMBLE + SUM)
    first, second = schedule.operands
    assert (first.index, first.register, first.space, first.shape) == (0, "s0", "hbm", "s32[128]")
    assert (second.output, second.shape) == (True, "f32[8,128]")
    loop = schedule.bundles[5]
    assert (loop.labelled, loop.depth, loop.starts) == (True, 1, (3,))
    load = loop.scalar[0]
    assert load.op == "sld"
    assert load.dest == Register("s10", "s6")
    assert load.args == (Address((Symbol("allocation1"), Register("s11", "s3"))),)
    # Of vector ops nothing is left, of the DMA beside one everything.
    [dma] = schedule.bundles[13].scalar
    assert dma.args[:2] == (Symbol("allocation4"), Register("s14", "s4"))


def test_reads_guards_wherever_they_are() -> None:
    text = scalar(
        "%s1_s1 = smov.u32 (!%p2_p3, %s0_s1), 7",
        "%s4_s2 = sld [smem:[#allocation5 + $0x4]] (%p2_p3)",
        "%6 = sst [smem:[%s4_s2]] (!%p2_p3), %s1_s1",
        "%7 = vsyncadd (%p2_p3), [#allocation9], 4294967288",
    )
    move, load, store, signal = [bundle.scalar[0] for bundle in parse_bundles(PREAMBLE + text).bundles[:4]]
    assert move.guard == Register("p2", "p3", negated=True)
    assert (move.old, move.args) == (Register("s0", "s1"), (7,))
    assert (load.guard, load.args) == (Register("p2", "p3"), (Address((Symbol("allocation5"), 4)),))
    assert store.guard == move.guard
    assert store.args == (Address((Register("s4", "s2"),)), Register("s1", "s1"))
    # Constants are signed, as the core adds them.
    assert signal.args == (Symbol("allocation9"), -8)


def test_reads_the_matrix_units_instructions() -> None:
    text = scalar(
        "%1 = vmatmul.mubr.bf16.vlgmr.msra.gmra.mrb[6].mxu1 %v1_v1  ;;  %2 = vmatpush1.bf16.msra.mxu0 %v2_v2",
        "%v3_v3 = vpop.f32.mrb[6].mxu1  ;;  %4 = vmatmul.f32.gmra.mxu3 %v1_v1",
    )
    first, second = parse_bundles(PREAMBLE + text).bundles[:2]
    multiply, push = first.matrix
    assert (multiply.kind, multiply.unit, multiply.latches, multiply.entry) == ("multiply", 1, True, 6)
    assert (push.kind, push.unit) == ("push", 0)
    pop, narrow = second.matrix
    assert (pop.kind, pop.entry, narrow.float32) == ("pop", 6, True)


@pytest.mark.parametrize("dest", ["%s1_s1 = ", "%p1_p1 = ", "%1 = "])
def test_an_unknown_scalar_op_is_named_with_its_line(dest: str) -> None:
    text = PREAMBLE + scalar("%s0_s0 = smov.u32 1", f"{dest}sfrobnicate.s32 %s0_s0, 3")
    with pytest.raises(SimulationError, match=r"'sfrobnicate\.s32' in line 6"):
        parse_bundles(text)


def test_what_is_no_operand_is_an_error() -> None:
    with pytest.raises(SimulationError, match="no operand: '@'"):
        parse_bundles(PREAMBLE + scalar("%s1_s1 = sadd.s32 @, 3"))


def test_a_text_without_bundles_is_an_error() -> None:
    with pytest.raises(SimulationError, match="no bundles"):
        parse_bundles("nothing")
