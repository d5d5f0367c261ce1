"""What a Pallas kernel holds in VMEM: read from its Mosaic program, before the compiler sees it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .failure import Allocation, Failure

_FUNCTION = re.compile(
    r"function_type = \((?P<arguments>.*)\) -> \(\), iteration_bounds = array<i64(?:: (?P<grid>[\d, -]+))?>, "
    r"scalar_prefetch = (?P<prefetch>\d+) : i64, scratch_operands = (?P<scratch>\d+) : i64, "
    r'sym_name = "(?P<name>[^"]*)"(?P<rest>.*)'
)
_VMEM_ARRAY = re.compile(
    r"memref<(?P<dims>(?:\d+x)+)(?P<dtype>[a-z]+(?P<bits>\d+)\w*), .*#tpu\.memory_space<vmem>"
)
_WINDOW = re.compile(r"\{[^{}]*\}")
_LANES = 128
_SUBLANE_BYTES = 32  # of one lane in a tile: 8 rows of 32 bits, 16 of 16


@dataclass(frozen=True)
class Block:
    """An array in VMEM.

    Attributes:
        dtype: As XLA writes it, e.g. `f32`.
        dims: Its axes.
        bits: Of an element.
        buffers: 2 where the next block is fetched, or the last one written, during the work on this one.
        scratch: It is the kernel's own, not a window on an operand or result.
    """

    dtype: str
    dims: tuple[int, ...]
    bits: int
    buffers: int
    scratch: bool

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def rows_of_tile(self) -> int:
        return max(8, _SUBLANE_BYTES * 8 // self.bits)

    @property
    def bytes(self) -> int:
        """Of all buffers, with what tiles of 8 x 128 elements pad."""
        *outer, rows, columns = (1, *self.dims) if len(self.dims) == 1 else self.dims
        elements = math.prod(outer) * _up(rows, 8) * _up(columns, _LANES)
        return self.buffers * elements * self.bits // 8


def read_blocks(kernel: str) -> tuple[str, tuple[Block, ...]]:
    """The name of a kernel and its arrays in VMEM, from the text of its Mosaic module.

    What a kernel allocates within its body (`run_scoped`, `emit_pipeline`) is not among them.
    """
    match = _FUNCTION.search(kernel)
    if match is None:
        return "", ()
    arguments = re.split(r", (?=memref<|i32\b)", match["arguments"])
    grid = [int(size) for size in match["grid"].split(",")] if match["grid"] else []
    first, end = len(grid) + int(match["prefetch"]), len(arguments) - int(match["scratch"])
    windows = _WINDOW.findall(match["rest"])
    steps = math.prod(grid)
    blocks = []
    for place, argument in enumerate(arguments):
        if array := _VMEM_ARRAY.match(argument):
            scratch = place >= end
            # (The number of steps is negative where it is known at run time only.)
            window = windows[place - first] if 0 <= place - first < len(windows) else ""
            pipelined = not scratch and steps != 1 and "synchronous" not in window
            dims = tuple(int(size) for size in array["dims"].split("x") if size)
            blocks.append(Block(array["dtype"], dims, int(array["bits"]), 2 if pipelined else 1, scratch))
    return match["name"], tuple(blocks)


def explain(failure: Failure, kernels: Mapping[str, tuple[Block, ...]]) -> Failure:
    """Adds to a shortage of VMEM what takes it, where the compiler does not say, and what would fit."""
    blocks = kernels.get(failure.kernel or "")
    if blocks is None and len(kernels) == 1:
        # Without a name of its own, a kernel is called after other things by Pallas and by XLA.
        [blocks] = kernels.values()
    if failure.memory != "vmem" or not blocks:
        return failure
    assert failure.asked_bytes is not None
    assert failure.allowed_bytes is not None
    parts = sorted(blocks, key=lambda block: -block.bytes)
    allocations = tuple(
        Allocation(block.bytes, str(block), block.buffers, "scratch" if block.scratch else "block")
        for block in parts
    )
    windows = [block for block in parts if not block.scratch]
    summary = failure.summary
    fits = _fitting(windows, failure.asked_bytes, failure.allowed_bytes)
    if fits:
        summary += f"; with all blocks cut alike, {fits} in place of {windows[0]} would fit"
    return dataclasses.replace(
        failure, summary=summary, fits=fits, allocations=failure.allocations or allocations
    )


def _fitting(windows: list[Block], asked: int, allowed: int) -> str | None:
    """The largest block, with fewer rows, when all blocks shrink by what is too much; None if none would do."""
    total = sum(block.bytes for block in windows)
    if not windows or len(windows[0].dims) < 2:
        return None
    # What is not blocks is taken to stay, though the compiler's part of it shrinks as well.
    share = (allowed - (asked - total)) / total
    largest = windows[0]
    *outer, rows, columns = largest.dims
    cut = int(rows * share) // largest.rows_of_tile * largest.rows_of_tile
    if not 0 < cut < rows:
        return None
    return str(dataclasses.replace(largest, dims=(*outer, cut, columns)))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
