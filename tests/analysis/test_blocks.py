from __future__ import annotations

import dataclasses

from tpu_kernels.analysis.blocks import Block, explain, read_blocks
from tpu_kernels.analysis.failure import Failure

MIB = 1024 * 1024

KERNEL = """module attributes {stable_mosaic.version = 11 : i64} {
  "stable_mosaic.func.func"() ({
    "stable_mosaic.func.return"() : () -> ()
  }) {dimension_semantics = [#tpu.dimension_semantics<arbitrary>], function_type = (i32, \
memref<4xi32, #tpu.memory_space<smem>>, memref<64x1024xf32, #tpu.memory_space<vmem>>, \
memref<1x100x200xbf16, #tpu.memory_space<vmem>>, memref<8x8xf32, #tpu.memory_space<any>>, \
memref<16x128xi8, #tpu.memory_space<vmem>>, memref<!tpu.dma_semaphore, #tpu.memory_space<semaphore_mem>>) -> (), \
iteration_bounds = array<i64: 4>, scalar_prefetch = 1 : i64, scratch_operands = 2 : i64, sym_name = "mine", \
tpu.core_type = #tpu.core_type<tc>, window_params = [{transform_indices = @transform_0, window_bounds = \
array<i64: 64, 1024>}, {pipeline_mode = #tpu.pipeline_mode<synchronous>, transform_indices = @transform_1, \
window_bounds = array<i64: 1, 100, 200>}, {}]} : () -> ()
}
"""
SHORT = Failure(
    "compile", "too much", "", kernel="mine", memory="vmem", asked_bytes=12 * MIB, allowed_bytes=8 * MIB
)


def test_blocks_of_a_kernel() -> None:
    name, blocks = read_blocks(KERNEL)
    assert name == "mine"
    assert [(str(block), block.buffers, block.scratch) for block in blocks] == [
        ("f32[64,1024]", 2, False),
        ("bf16[1,100,200]", 1, False),
        ("i8[16,128]", 1, True),
    ]
    assert [block.bytes for block in blocks] == [2 * 64 * 1024 * 4, 104 * 256 * 2, 16 * 128]
    assert read_blocks("module {}") == ("", ())


def test_what_would_fit() -> None:
    block = Block("bf16", (2048, 1024), 16, 2, scratch=False)  # 8 MiB
    # 4 MiB beside the block stay, so 4 of its 8 MiB are left.
    explained = explain(SHORT, {"mine": (block,)})
    assert explained.fits == "bf16[1024,1024]"
    assert explained.summary == (
        "too much; with all blocks cut alike, bf16[1024,1024] in place of bf16[2048,1024] would fit"
    )
    assert [part.bytes for part in explained.allocations] == [8 * MIB]


def test_no_block_would_fit() -> None:
    scratch = Block("f32", (2048, 1024), 32, 1, scratch=True)
    tiny = Block("f32", (8, 128), 32, 2, scratch=False)
    explained = explain(SHORT, {"mine": (tiny, scratch)})
    assert (explained.fits, explained.summary) == (None, "too much")
    assert [part.what for part in explained.allocations] == ["scratch", "block"]


def test_other_failures_stay_as_they_are() -> None:
    block = Block("f32", (2048, 1024), 32, 1, scratch=False)
    in_hbm = dataclasses.replace(SHORT, memory="hbm")
    assert explain(in_hbm, {"mine": (block,)}) is in_hbm
    assert explain(SHORT, {"one": (block,), "other": (block,)}) is SHORT
    assert explain(SHORT, {}) is SHORT
