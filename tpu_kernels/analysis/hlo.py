"""Reads an optimised TPU program: the kernels in it, and what XLA runs around them.

The text is XLA's HLO after scheduling, in which every array has its layout and memory::

    %copy.1 = bf16[8,2816,704]{2,1,0:T(8,128)(2,1)S(1)} copy(%w.1), metadata={op_name="w"}, backend_config={...}

Braces after a shape: axes from the minor one on, then tiles ``T``, then the memory ``S`` (none: HBM, 1: VMEM).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

KERNEL_TARGET = "tpu_custom_call"
HBM, VMEM = 0, 1

Kind = Literal[
    "layout copy",
    "transpose",
    "convert",
    "pad",
    "concatenate",
    "slice",
    "copy",
    "move",
    "collective",
    "compute",
]
# What neither computes nor feeds a unit: work that another layout, shape or dtype of the data would save.
OVERHEAD: frozenset[Kind] = frozenset(
    ("layout copy", "transpose", "convert", "pad", "concatenate", "slice", "copy")
)

_FREE = {
    *("after-all", "bitcast", "constant", "get-tuple-element", "parameter", "partition-id", "replica-id"),
    *("opt-barrier", "tuple"),
}
_VIEWS = ("bitcast", "copy", "copy-done", "copy-start", "get-tuple-element", "slice-done", "slice-start")
# The kind of a fusion of these alone is that of the first in this order.
_MOVEMENT: dict[str, Kind] = {
    "transpose": "transpose",
    "convert": "convert",
    "pad": "pad",
    "concatenate": "concatenate",
    "copy": "layout copy",
    "reshape": "layout copy",
    "slice": "slice",
    "dynamic-slice": "slice",
}
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective", "ragged-all-to-all", "reduce-scatter")
_BITS = {"pred": 8, "token": 0}

_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%(?P<name>\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(?P<name>\S+) = ")
_SHAPE = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,<=]*)\](?:\{(?P<layout>[^}]*)\})?")
_BRACKET = re.compile(r"[()]")
_REFERENCE = re.compile(r"%([\w.-]+)")
_OPERAND = re.compile(r"%([\w.-]+(?:#\d+)?)")  # `%fusion#1` is the second result of `%fusion`
_CALLED = re.compile(r"(?:body|condition|calls|true_computation|false_computation)=%([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclass(frozen=True)
class Array:
    """An array of a program.

    Attributes:
        shape: With its dtype, as XLA writes it, e.g. `bf16[8,2816,704]`.
        dims: Its axes.
        layout: Order of the axes and tiles, e.g. `2,1,0:T(8,128)(2,1)`.
        memory: `HBM`, `VMEM`, or another number that XLA gives a memory.
        bytes: Without what tiles pad it by.
    """

    shape: str
    dims: tuple[int, ...]
    layout: str
    memory: int
    bytes: int


@dataclass(frozen=True)
class Kernel:
    """A Pallas kernel in a program.

    Attributes:
        name: As given to `pallas_call`, else the kernel function's.
        instruction: In the program's text.
        dims: Axes of its operands and results.
        operands: Which argument of the program each operand is, by name, or what computes it.
        vmem_bytes: What Mosaic allocates in VMEM: blocks (times their buffers), scratch and its own; None
            where the program does not tell.
        vmem_limit_bytes: What the kernel may allocate; None where it has the compiler's default.
        vmem_staged_bytes: Operands and results beside these that XLA keeps in VMEM, not HBM.
    """

    name: str
    instruction: str
    dims: tuple[tuple[int, ...], ...]
    operands: tuple[str, ...]
    vmem_bytes: int | None
    vmem_limit_bytes: int | None
    vmem_staged_bytes: int


@dataclass(frozen=True)
class XlaOp:
    """An op that XLA runs beside the kernels. An op within a loop is listed once.

    Attributes:
        name: In the program's text.
        kind: What it is for: `layout copy` (same values, other order or tiles in memory), `transpose`,
            `convert`, `pad`, `concatenate`, `slice`, `copy` (none of these), `move` (from memory to memory,
            e.g. a prefetch into VMEM), `collective`, `compute`.
        shape: Of the (largest) result, e.g. `bf16[8,2816,704]`.
        bytes: Of the (largest) result, without padding to tiles.
        traffic_bytes: Read from HBM and written to it.
        source: Where it comes from: the name of an argument, or the path of a JAX operation.
        layouts: Before and after, of a layout copy that is no fusion.
        estimated_cycles: XLA's own estimate.
    """

    name: str
    kind: Kind
    shape: str
    bytes: int
    traffic_bytes: int
    source: str
    layouts: tuple[str, str] | None
    estimated_cycles: int | None


@dataclass(frozen=True)
class _Instruction:
    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str  # what follows the operands
    config: dict[str, Any]

    @property
    def largest(self) -> Array:
        return max(self.results, key=lambda array: array.bytes)


_Computation = dict[str, _Instruction]


def read_program(text: str, *, smallest: int = 1024) -> tuple[tuple[Kernel, ...], tuple[XlaOp, ...]]:
    """The kernels of a program, and the ops that XLA runs beside them, the largest first.

    Ops with results of less than `smallest` bytes are left out (scalars, group sizes), as is what only goes to
    scalar memory.
    """
    computations, entry = _parse(text)
    kernels: list[Kernel] = []
    ops: list[XlaOp] = []
    for computation, instruction in _executed(computations, entry):
        if _is_kernel(instruction):
            kernels.append(_kernel(instruction, computation))
        elif (
            instruction.results
            and instruction.largest.bytes >= smallest
            and instruction.largest.memory in (HBM, VMEM)
        ):
            ops.append(_op(instruction, computation, computations))
    return tuple(kernels), tuple(sorted(ops, key=lambda op: -op.bytes))


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations[header["name"]] = {}
            if header["entry"]:
                entry = header["name"]
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current[match["name"]] = _instruction(match["name"], line[match.end() :])
    return computations, entry


def _instruction(name: str, text: str) -> _Instruction:
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    result, rest = text[:end], text[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    attributes = rest[closing:]
    config: dict[str, Any] = {}
    at = attributes.find("backend_config={")
    if at >= 0:
        config, _ = json.JSONDecoder().raw_decode(attributes, at + len("backend_config="))
    return _Instruction(
        name,
        rest[:opening],
        tuple(_array(match) for match in _SHAPE.finditer(result)),
        tuple(_OPERAND.findall(rest[opening:closing])),
        attributes,
        config,
    )


def _closing(text: str, start: int) -> int:
    """The place after the bracket that closes the one at `start`."""
    depth = 0
    for bracket in _BRACKET.finditer(text, start):
        depth += 1 if bracket[0] == "(" else -1
        if depth == 0:
            return bracket.end()
    return len(text)


def shape_bytes(shape: str) -> int:
    """Bytes of an array, as in `bf16[8,128]`.

    Raises:
        ValueError: It is no shape.
    """
    match = _SHAPE.match(shape)
    if match is None:
        raise ValueError(f"no shape: {shape!r}")
    return _array(match).bytes


def _array(match: re.Match[str]) -> Array:
    dims = tuple(int(axis.removeprefix("<=")) for axis in match["dims"].split(",") if axis)
    layout = match["layout"] or ""
    memory = re.search(r"S\((\d+)\)", layout)
    digits = re.search(r"\d+", match["dtype"])
    bits = _BITS[match["dtype"]] if match["dtype"] in _BITS else int(digits[0]) if digits else 0
    return Array(
        shape=f"{match['dtype']}[{match['dims']}]",
        dims=dims,
        layout=re.sub(r"S\(\d+\)", "", layout).removesuffix(":"),
        memory=int(memory[1]) if memory else HBM,
        bytes=math.prod(dims) * bits // 8,
    )


def _executed(
    computations: dict[str, _Computation], entry: str
) -> Iterator[tuple[_Computation, _Instruction]]:
    """What takes time when the program runs: the entry's instructions and those of loops and branches."""
    waiting, seen = [entry], {entry}
    while waiting:
        computation = computations.get(waiting.pop(), {})
        for instruction in computation.values():
            inner = [name for name in _called(instruction) if name not in seen]
            if instruction.opcode in ("while", "conditional", "call", "async-start"):
                seen.update(inner)
                waiting.extend(inner)
            elif instruction.opcode not in _FREE and not instruction.opcode.endswith(("-done", "-update")):
                yield computation, instruction


def _called(instruction: _Instruction) -> list[str]:
    attributes = instruction.attributes
    names = _CALLED.findall(attributes)
    if instruction.opcode == "call":
        names += re.findall(r"to_apply=%([\w.-]+)", attributes)
    return names + [name for group in _BRANCHES.findall(attributes) for name in _REFERENCE.findall(group)]


def _is_kernel(instruction: _Instruction) -> bool:
    return (
        instruction.opcode == "custom-call"
        and f'custom_call_target="{KERNEL_TARGET}"' in instruction.attributes
    )


def _kernel(instruction: _Instruction, computation: _Computation) -> Kernel:
    operands = [array for name in instruction.operands for array in _arrays(name, computation)]
    staged = [array for array in (*operands, *instruction.results) if array.memory == VMEM]
    return Kernel(
        name=_unnumbered(instruction.name),
        instruction=instruction.name,
        dims=tuple(array.dims for array in (*operands, *instruction.results)),
        operands=tuple(_origin(name, computation) for name in instruction.operands),
        vmem_bytes=_scoped(instruction, "used_scoped_memory_configs"),
        vmem_limit_bytes=_scoped(instruction, "scoped_memory_configs"),
        vmem_staged_bytes=sum(array.bytes for array in staged),
    )


def _unnumbered(name: str) -> str:
    """XLA numbers instructions of one name."""
    return re.sub(r"\.\d+$", "", name)


def _origin(name: str, computation: _Computation) -> str:
    """What is behind moves and views of an array."""
    instruction = computation.get(name.partition("#")[0])
    while instruction is not None and instruction.opcode in _VIEWS and instruction.operands:
        name = instruction.operands[0]
        instruction = computation.get(name.partition("#")[0])
    if instruction is not None and instruction.opcode == "parameter":
        argument = re.search(r'op_name="([^"]*)"', instruction.attributes)
        name = argument[1] if argument else name
    return _unnumbered(name)


def _arrays(name: str, computation: _Computation) -> tuple[Array, ...]:
    """The results of an instruction, or the one that `name` picks."""
    instruction, _, place = name.partition("#")
    if instruction not in computation:
        return ()
    results = computation[instruction].results
    return (results[int(place)],) if place else results


def _traffic(instruction: _Instruction, computation: _Computation, kind: Kind) -> int:
    read = sum(
        array.bytes
        for name in instruction.operands
        for array in _arrays(name, computation)
        if array.memory == HBM
    )
    if instruction.opcode.endswith("-start"):
        # Its results are the operand, the result and its own state.
        written = instruction.largest.bytes if len(instruction.results) < 2 else instruction.results[0].bytes
        return max(read, written)
    written = sum(array.bytes for array in instruction.results if array.memory == HBM)
    # Of what is sliced, only the part is read.
    return (min(read, instruction.largest.bytes) if kind == "slice" else read) + written


def _scoped(instruction: _Instruction, field: str) -> int | None:
    sizes = [int(c["size"]) for c in instruction.config.get(field, ()) if int(c["memory_space"]) == VMEM]
    return sum(sizes) if sizes else None


def _op(instruction: _Instruction, computation: _Computation, computations: dict[str, _Computation]) -> XlaOp:
    result = instruction.largest
    before = _arrays(instruction.operands[0], computation) if instruction.operands else ()
    operand = max(before, key=lambda array: array.bytes, default=None)
    kind = _kind(instruction, operand, computations)
    relaid = kind == "layout copy" and instruction.opcode != "fusion"
    source = re.search(r'op_name="([^"]*)"', instruction.attributes)
    cycles = instruction.config.get("window_config", {}).get("estimated_cycles")
    return XlaOp(
        name=instruction.name,
        kind=kind,
        shape=result.shape,
        bytes=result.bytes,
        traffic_bytes=_traffic(instruction, computation, kind),
        source=source[1] if source else "",
        layouts=(operand.layout, result.layout) if operand is not None and relaid else None,
        estimated_cycles=int(cycles) if cycles else None,
    )


def _kind(instruction: _Instruction, operand: Array | None, computations: dict[str, _Computation]) -> Kind:
    opcode = instruction.opcode.removesuffix("-start")
    result = instruction.largest
    if opcode == "copy" and operand is not None and operand.layout == result.layout:
        return "move" if operand.memory != result.memory else "copy"
    if opcode == "slice" and instruction.opcode.endswith("-start"):
        return "move"
    if opcode.startswith(_COLLECTIVES):
        return "collective"
    opcodes = {opcode}
    if opcode == "fusion":
        fused = [i for name in _called(instruction) for i in computations.get(name, {}).values()]
        opcodes = {i.opcode for i in fused} - _FREE
    if opcodes and opcodes <= _MOVEMENT.keys():
        return next(kind for name, kind in _MOVEMENT.items() if name in opcodes)
    return "compute"
