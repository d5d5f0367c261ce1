from __future__ import annotations

from tpu_kernels.analysis.hlo import read_program

PROGRAM = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

FileNames
1 "kernel.py"

%fused_computation (param_0: bf16[100,64]) -> f32[128,64] {
  %param_0 = bf16[100,64]{1,0:T(8,128)(2,1)} parameter(0)
  %constant.1 = bf16[]{:T(256)} constant(0)
  %pad.1 = bf16[128,64]{1,0:T(8,128)(2,1)} pad(%param_0, %constant.1), padding=0_28x0_0
  ROOT %convert.1 = f32[128,64]{1,0:T(8,128)} convert(%pad.1)
}

%fused_computation.1 (param_0.1: f32[128,64]) -> f32[128,64] {
  %param_0.1 = f32[128,64]{1,0:T(8,128)} parameter(0)
  ROOT %add.1 = f32[128,64]{1,0:T(8,128)} add(%param_0.1, %param_0.1)
}

%body (arg: (s32[], f32[128,64])) -> (s32[], f32[128,64]) {
  %arg = (s32[]{:T(128)}, f32[128,64]{1,0:T(8,128)}) parameter(0)
  %gte = f32[128,64]{1,0:T(8,128)} get-tuple-element(%arg), index=1
  %count = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %transpose.9 = f32[64,128]{1,0:T(8,128)} transpose(%gte), dimensions={1,0}
  ROOT %tuple = (s32[]{:T(128)}, f32[128,64]{1,0:T(8,128)}) tuple(%count, %gte)
}

%condition (arg.1: (s32[], f32[128,64])) -> pred[] {
  %arg.1 = (s32[]{:T(128)}, f32[128,64]{1,0:T(8,128)}) parameter(0)
  ROOT %constant.3 = pred[]{:T(512)} constant(true)
}

ENTRY %main.1 (w.1: bf16[8,2816,704], x.1: bf16[100,64]) -> f32[128,64] {
  %w.1 = bf16[8,2816,704]{1,2,0:T(8,128)(2,1)} parameter(0), metadata={op_name="w"}
  %x.1 = bf16[100,64]{1,0:T(8,128)(2,1)} parameter(1), metadata={op_name="x"}
  %copy.1 = bf16[8,2816,704]{2,1,0:T(8,128)(2,1)} copy(%w.1), metadata={op_name="w"}, \
backend_config={"window_config":{"estimated_cycles":"164560"},"used_scoped_memory_configs":[]}
  %copy-start = (bf16[100,64]{1,0:T(8,128)(2,1)S(1)}, bf16[100,64]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) \
copy-start(%x.1)
  %copy-done = bf16[100,64]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %fusion = f32[128,64]{1,0:T(8,128)} fusion(%x.1), kind=kLoop, calls=%fused_computation
  %fusion.1 = f32[128,64]{1,0:T(8,128)} fusion(%fusion), kind=kLoop, calls=%fused_computation.1
  %small = s32[64]{0:T(128)} copy(%x.1)
  %zero = s32[]{:T(128)} constant(0)
  %init = (s32[]{:T(128)}, /*index=1*/f32[128,64]{1,0:T(8,128)}) tuple(%zero, %fusion.1)
  %while = (s32[]{:T(128)}, f32[128,64]{1,0:T(8,128)}) while(%init), condition=%condition, body=%body
  ROOT %ragged_dot.2 = f32[128,64]{1,0:T(8,128)S(1)} custom-call(%copy.1, %copy-done), \
custom_call_target="tpu_custom_call", backend_config={"scoped_memory_configs":[{"memory_space":"1","offset":"0",\
"size":"8388608"}],"custom_call_config":{"body":""},"used_scoped_memory_configs":[{"memory_space":"1",\
"offset":"0","size":"262144"}]}
}
"""


def test_kernels() -> None:
    [kernel], _ = read_program(PROGRAM)
    assert kernel.name == "ragged_dot"
    assert (kernel.vmem_bytes, kernel.vmem_limit_bytes) == (262144, 8388608)
    assert kernel.vmem_staged_bytes == 100 * 64 * 2 + 128 * 64 * 4  # the fetched operand and the result


def test_ops_by_size() -> None:
    _, ops = read_program(PROGRAM)
    assert [(op.name, op.kind, op.bytes) for op in ops] == [
        ("copy.1", "layout copy", 8 * 2816 * 704 * 2),
        ("fusion", "convert", 128 * 64 * 4),
        ("fusion.1", "compute", 128 * 64 * 4),
        ("transpose.9", "transpose", 128 * 64 * 4),  # in the loop
        ("copy-start", "move", 100 * 64 * 2),
    ]
    copy = ops[0]
    assert (copy.shape, copy.source, copy.estimated_cycles) == ("bf16[8,2816,704]", "w", 164560)
    assert copy.layouts == ("1,2,0:T(8,128)(2,1)", "2,1,0:T(8,128)(2,1)")


def test_no_program() -> None:
    assert read_program("") == ((), ())
