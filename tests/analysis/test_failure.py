"""Messages of libtpu 0.0.52, shortened."""

from __future__ import annotations

from tpu_kernels.analysis.failure import Allocation, read_error

MIB = 1024 * 1024

OVER_CAPACITY = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem. \
Used 256.00M of 127.94M vmem. Exceeded vmem capacity by 128.06M.

Program vmem requirement 256.00M:
    scoped          256.00M

  Largest program allocations in vmem:

  1. Size: 128.00M
     Operator: op_name="jit(f)/big/pallas_call"
     Shape: u8[134217728]{0}
     Unpadded size: 128.00M
     Tag: input window allocation for operator input 0. The window shape is f32[4096,4096], while the full shape \
is f32[8192,4096]. The u8 shape/size shown above represents the raw byte size of this window in VMEM. This \
allocation has 2 buffering levels.
     XLA label: big.1 = custom-call(x.1), custom_call_target="tpu_custom_call", operand_layout_constraints={}
     Allocation type: scoped
     ==========================

  2. Size: 64.00M
     Operator: op_name="jit(f)/big/pallas_call"
     Shape: u8[67108864]{0}
     Unpadded size: 64.00M
     Tag: output window allocation for operator output 0. The window shape is f32[4096,4096], while the full \
shape is f32[4096,4096]. This allocation is single buffered.
     XLA label: big.1 = custom-call(x.1), custom_call_target="tpu_custom_call", operand_layout_constraints={}
     Allocation type: scoped
     ==========================

 [type.googleapis.com/tensorflow.tpu.CompilationResultProto='Ran out of memory in ...[truncated]']"""

OVER_LIMIT = """RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:
Ran out of memory in memory space vmem while allocating on stack for %big.1 = f32[4096,1024]{1,0:T(8,128)} \
custom-call(%x.1), custom_call_target="tpu_custom_call", operand_layout_constraints={f32[4096,1024]{1,0}}, \
metadata={op_name="jit(f)/big/pallas_call" stack_frame_id=2}. Scoped allocation with size 16.00M and limit 8.00M \
exceeded scoped vmem limit by 8.00M. It should not be possible to run out of scoped vmem -
See https://openxla.org/xla/errors/error_1001 for more details."""

OVER_HBM = """RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for \
HLO temporaries (192.00G) exceeds available HBM (31.24G). HLO module: jit_f.
See https://openxla.org/xla/errors/error_1000 for more details."""

MOSAIC = """INTERNAL: Mosaic failed to compile TPU kernel with MLIR module name `<no name>` HLO name `slices.1`: \
E2003: CompileTimeMosaicUnprovenMemoryAccessAlignment: cannot statically prove that index in dimension 1 is a \
multiple of 128
See https://openxla.org/xla/errors/error_2003 for more details.

at location: loc("get:"("get/get"(callsite("f.<locals>.k"("/somewhere/kernel.py":11:41 to :72) at "g"("b.py":1:2))))

The MLIR operation involved:
  %6 = "xir.vector_load"(%arg1, %1, %5) : (memref<8x512xf32>, index, index) -> vector<8x128xf32>
"""


def test_more_vmem_than_there_is() -> None:
    failure = read_error(OVER_CAPACITY)
    assert (failure.stage, failure.kernel, failure.memory) == ("compile", "big", "vmem")
    assert failure.asked_bytes == 256 * MIB
    assert failure.allowed_bytes == round(127.94 * MIB)
    first, second = failure.allocations
    assert isinstance(first, Allocation)
    assert (first.bytes, first.window, first.buffers) == (128 * MIB, "f32[4096,4096]", 2)
    assert (second.bytes, second.buffers) == (64 * MIB, 1)
    assert first.what.startswith("input window allocation for operator input 0.")
    assert failure.summary == (
        "kernel big needs 256.0 MiB of VMEM, 2 times the 127.9 MiB allowed; the largest part is "
        "2 buffers of f32[4096,4096], 128.0 MiB"
    )
    assert failure.text == OVER_CAPACITY


def test_more_vmem_than_the_kernel_may_have() -> None:
    failure = read_error(OVER_LIMIT)
    assert (failure.kernel, failure.memory) == ("big", "vmem")
    assert (failure.asked_bytes, failure.allowed_bytes) == (16 * MIB, 8 * MIB)
    assert failure.summary == "kernel big needs 16.0 MiB of VMEM, 2 times the 8.0 MiB allowed"


def test_more_hbm_than_there_is() -> None:
    failure = read_error(OVER_HBM)
    assert (failure.kernel, failure.memory) == (None, "hbm")
    assert failure.asked_bytes == 192 * 1024 * MIB
    assert failure.summary == "the program needs 192.0 GiB of HBM, 6.1 times the 31.2 GiB allowed"


def test_what_mosaic_refuses() -> None:
    failure = read_error(MOSAIC)
    assert (failure.kernel, failure.location, failure.memory) == ("slices", "/somewhere/kernel.py:11", None)
    assert failure.summary == (
        "kernel slices: cannot statically prove that index in dimension 1 is a multiple of 128, "
        "at /somewhere/kernel.py:11"
    )


def test_an_unknown_message_is_passed_on() -> None:
    failure = read_error("INTERNAL: something\nelse\n\nwith details")
    assert failure.summary == "something else"
    assert failure.text.endswith("with details")
