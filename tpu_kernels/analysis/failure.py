"""Makes the TPU compiler's errors readable: which kernel, which memory, what was asked for and allowed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from .sizes import format_bytes, parse_bytes

Stage = Literal["lower", "compile", "crash", "timeout"]

_SIZE = r"([\d.]+[BKMGT]?)"
_OVER_CAPACITY = re.compile(rf"Ran out of memory in memory space (\w+)\. Used {_SIZE} of {_SIZE} ")
_OVER_LIMIT = re.compile(
    rf"Ran out of memory in memory space (\w+) .*?Scoped allocation with size {_SIZE} and limit {_SIZE} ",
    re.DOTALL,
)
_OVER_MEMORY = re.compile(
    r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\)[^\n]*?space=(\w+)[^\n]*:: ([\w.-]+)"
)
_OVER_HBM = re.compile(rf"memory required for .*?\({_SIZE}\) exceeds available HBM \({_SIZE}\)")
_ALLOCATION = re.compile(r"^  \d+\. Size: .*?(?=^ +=====|\Z)", re.DOTALL | re.MULTILINE)
_KERNEL = re.compile(r'%?([\w.-]+) = [^\n]*?custom-call\([^\n]*?custom_call_target="tpu_custom_call"')
_OP_NAME = re.compile(r'op_name="([^"]*?)(?:/pallas_call)?"')
_MOSAIC = re.compile(
    r"Mosaic failed to compile TPU kernel(?: with [^\n]*?HLO name `(?P<kernel>[^`]*)`)?: "
    r"(?:E\d+: \w+: )?(?P<message>.*?)\s*(?:\n\s*\n|\Z)",
    re.DOTALL,
)
_LOCATION = re.compile(r'^at location: [^\n]*?\("([^"]+)":(\d+):', re.MULTILINE)
_TRAILER = re.compile(r"\n?\s*\[type\.googleapis\.com.*|\nSee https://\S+ for more details\.", re.DOTALL)
_STATUS = re.compile(r"^[A-Z_]+: (?:XLA:TPU compile permanent error\. )?(?:E\d+: \w+:\s*)?")


@dataclass(frozen=True)
class Allocation:
    """One of the arrays that did not fit.

    Attributes:
        bytes: All its buffers together.
        window: What is held at a time, e.g. `f32[4096,4096]`; empty where that is not known.
        buffers: How many of it.
        what: A description.
    """

    bytes: int
    window: str
    buffers: int
    what: str


@dataclass(frozen=True)
class Failure:
    """Why a program did not compile.

    Attributes:
        stage: `lower` (JAX could not trace or lower the function), `compile` (the compiler refused it),
            `crash` (the compiler's process ended), `timeout`.
        summary: One line for people.
        kernel: The kernel at fault, where the message names one.
        location: The line of its source, as file:line, where the message has it. (That of the first compile: a
            cached report does not follow source that moves.)
        memory: The memory that was not enough: `vmem`, `smem` or `hbm`.
        asked_bytes, allowed_bytes: Of that memory; rounded by the compiler to about 1 %.
        allocations: The largest ones, where the message or the kernel tells them.
        fits: The largest block, were all blocks cut alike, that would have fit, e.g. `f32[512,1024]`.
        text: The original message.
    """

    stage: Stage
    summary: str
    text: str
    kernel: str | None = None
    location: str | None = None
    memory: str | None = None
    asked_bytes: int | None = None
    allowed_bytes: int | None = None
    allocations: tuple[Allocation, ...] = ()
    fits: str | None = None


def read_error(text: str) -> Failure:
    """Reads a message of the compiler."""
    kernel = _kernel(text)
    for pattern in (_OVER_CAPACITY, _OVER_LIMIT, _OVER_HBM):
        if match := pattern.search(text):
            *memory, asked, allowed = match.groups()
            return _out_of_memory(
                text, kernel, memory[0] if memory else "hbm", parse_bytes(asked), parse_bytes(allowed)
            )
    if match := _OVER_MEMORY.search(text):
        return _out_of_memory(text, _without_number(match[4]), match[3], int(match[1]), int(match[2]))
    message = _TRAILER.sub("", text)
    if mosaic := _MOSAIC.search(message):
        kernel = _without_number(mosaic["kernel"]) if mosaic["kernel"] else kernel
        message = mosaic["message"]
    message = " ".join(_STATUS.sub("", message).split("\n\n")[0].split())
    found = _LOCATION.search(text)
    location = f"{found[1]}:{found[2]}" if found else None
    summary = f"kernel {kernel}: {message}" if kernel else message
    return Failure("compile", f"{summary}, at {location}" if location else summary, text, kernel, location)


def read_exception(error: Exception, trace: str) -> Failure:
    """Reads what JAX raised while it traced and lowered a function; `trace` is its traceback."""
    first = str(error).strip().split("\n\n")[0]
    message = " ".join(first.split())
    return Failure("lower", f"{type(error).__name__}: {message}" if message else type(error).__name__, trace)


def _kernel(text: str) -> str | None:
    if match := _KERNEL.search(text):
        return _without_number(match[1])
    match = _OP_NAME.search(text)
    return match[1].rsplit("/", 1)[-1] if match else None


def _without_number(name: str) -> str:
    """XLA numbers instructions of one name."""
    return re.sub(r"\.\d+$", "", name)


def _out_of_memory(text: str, kernel: str | None, memory: str, asked: int, allowed: int) -> Failure:
    allocations = tuple(_allocation(match[0]) for match in _ALLOCATION.finditer(text))
    who = f"kernel {kernel}" if kernel else "the program"
    summary = (
        f"{who} needs {format_bytes(asked)} of {memory.upper()}, {asked / allowed:.2g} times the "
        f"{format_bytes(allowed)} allowed"
    )
    if allocations:
        largest = allocations[0]
        count = f"{largest.buffers} buffers of " if largest.buffers > 1 else ""
        what = f"{count}{largest.window}" if largest.window else largest.what
        summary += f"; the largest part is {what}, {format_bytes(largest.bytes)}"
    return Failure(
        "compile",
        summary,
        text,
        kernel,
        memory=memory,
        asked_bytes=asked,
        allowed_bytes=allowed,
        allocations=allocations,
    )


def _allocation(text: str) -> Allocation:
    exact = re.search(r"Shape: u8\[(\d+)\]", text)
    size = exact[1] if exact else re.findall(rf"Size: {_SIZE}", text)[0]
    tag = re.search(r"Tag: ([^\n]*)", text) or re.search(r"(?:Operator|XLA label): ([^\n]*)", text)
    window = re.search(r"The window shape is (\w+\[[\d,]*\])", text)
    buffers = re.search(r"This allocation has (\d+) buffering levels", text)
    return Allocation(
        bytes=parse_bytes(size),
        window=window[1] if window else "",
        buffers=int(buffers[1]) if buffers else 1,
        what=tag[1] if tag else "",
    )
