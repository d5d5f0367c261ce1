"""Bundles as libtpu prints them, short enough to write by hand."""

from __future__ import annotations

from tpu_kernels.analysis.simulator.blocks import find_blocks
from tpu_kernels.analysis.simulator.executor import run
from tpu_kernels.analysis.simulator.parser import parse_bundles
from tpu_kernels.analysis.simulator.trace import Trace

PREAMBLE = "= control target key start\nLB: loop body\n= control target key end\n\n"

# Adds up as many words of a scalar operand as its first word says, and starts a DMA of as many granules as they sum
# up to. The branch takes effect after four more bundles.
SUM = """
     0   :  { %s1_s0 = inlined_call_operand.hbm [shape: s32[128], index: 0, kind: input, shape index: {}]  ;;  %s2_s1 = inlined_call_operand.hbm [shape: f32[8,128], index: 1, kind: output, shape index: {}] } /* entry */
   0x1   :  { %s3_s2 = smov.u32 [#allocation1]  ;;  %s4_s3 = smov.u32 0  ;;  %s5_s4 = smov.u32 0 }
   0x2   :  { %6 = dma.hbm_to_smem %s1_s0, 16, %s3_s2, [#allocation2] }
   0x3   :  { %7 = dma.done.wait [#allocation2], 16 }
   0x4   :  { %8 = vsyncadd [#allocation2], 4294967280  ;;  %s9_s5 = sld [smem:[#allocation1]] }
   0x5 LB: > { %s10_s6 = sld [smem:[#allocation1 + %s11_s3]]  ;;  %s11_s3 = sphi %s4_s3, %s13_s3  ;;  %s12_s4 = sphi %s5_s4, %s14_s4 } /* Start region 3 */
   0x6   : > { %s13_s3 = sadd.s32 1, %s11_s3  ;;  %s14_s4 = sadd.s32 %s12_s4, %s10_s6 }
   0x7   : > { %p15_p0 = scmp.lt.s32.totalorder %s13_s3, %s9_s5 }
   0x8   : > { %16 = sbr.rel (%p15_p0) target = $region3 }
   0x9   :  {}
   0xa   :  {}
   0xb   :  {}
   0xc   :  {} /* End region 3 */
   0xd   :  { %v17_v0 = vld [vmem:[#allocation4] sm:$0xff]  ;;  %18 = dma.vmem_to_hbm [thread:$0]  [#allocation4], %s14_s4, %s2_s1, [#allocation3] }
   0xe   :  { %19 = dma.done.wait [#allocation3], %s14_s4 }
   0xf   :  { %20 = vsyncpa [#allocation3], 1 } /* exit bundle */
"""  # noqa: E501


def follow(text: str, data: dict[int, tuple[int, ...]] | None = None) -> Trace:
    """The trace of bundles in which a branch has four delay slots."""
    schedule = parse_bundles(PREAMBLE + text)
    names = [f"operand {place}" for place in range(8)]
    return run(schedule, find_blocks(schedule, 4), data or {}, granule=32, names=names)


def scalar(*instructions: str) -> str:
    """A kernel of a bundle for each instruction."""
    bundles = [f"  {place:#x}   :  {{ {text} }}" for place, text in enumerate(instructions, start=1)]
    return "\n".join([*bundles, "  0xff   :  {} /* exit bundle */", ""])
