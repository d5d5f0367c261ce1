"""Reads the text of a kernel's final bundles, as libtpu dumps it.

A bundle, with the loops around it, the instructions of one cycle and, in comments, the regions that start and end
there::

    0x20 LB: >> { %s100_s10 = scalar_lea.smem [#allocation4], %s7549_s8  ;;  ... } /* Start region 167 */

Registers are written `%<value>_<register>`. Everything on the scalar side must be understood: an instruction that
is not known is an error, since the time may hang on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from ...errors import SimulationError
from .ir import Address, Argument, Bundle, KernelOperand, MatrixOp, Register, ScalarOp, Schedule, Symbol
from .semantics import IGNORED, SCALAR_OPS, UNKNOWN

_PREAMBLE_END = "= control target key end"
_BUNDLE = re.compile(r"^\s*(?:0x)?[0-9a-f]+\s+(?:[A-Z]{2})?\s*:\s*(?P<loops>(?:>\s*)*)\{", re.MULTILINE)
_LABEL = re.compile(r"[A-Z]{2}\s*:")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
# What the general form of a DMA moves from where to where is told in a comment, if at all: blocks with strides on
# both sides have none, and are between HBM and vector memory.
_GENERAL_DMA = re.compile(r"dma\.general( .*?)/\* (\w+)-to-(\w+) \*/", re.DOTALL)
_START = re.compile(r"(?:Start|Start/End empty) region (\d+)")
_INSTRUCTION = re.compile(r"(?:(?P<dest>%\w+)(?:, %\w+)* = )?(?P<op>[a-z_][\w.]*)(?P<rest>.*)", re.DOTALL)
_REGISTER = re.compile(r"(?P<negated>!?)%(?P<value>\w+)_(?P<register>[sp]\d+)")
_VECTOR_DEST = re.compile(r"%\w+_vm?\d+")
_PSEUDO = re.compile(r"= (?:int_to_ptr|sphi)\b")  # no instructions of the machine
_GUARD = re.compile(r"\((!?%\w+_p\d+)[,)]")
_GUARD_FIRST = re.compile(r"\((?P<guard>!?%\w+)(?:, (?P<old>%\w+))?\)(?:,\s*|\s+|$)(?P<rest>.*)", re.DOTALL)
_GUARD_LAST = re.compile(r"(?P<rest>.*\S) \((?P<guard>!?%\w+)(?:, (?P<old>%\w+))?\)", re.DOTALL)
_GUARD_STORE = re.compile(r"(?P<rest>\[smem:.*\]) \((?P<guard>!?%\w+)\), (?P<value>\S+)", re.DOTALL)
_NOTE = re.compile(r"\[(?:resolvable|thread|tag|deref|priority)[^\]]*\]")
_SYMBOL = re.compile(r"\[?#(?P<name>allocation\w+)(?: \+ \$?(?P<offset>0x[0-9a-f]+|\d+))?\]?")
_INTEGER = re.compile(r"\$?(-?\d+|0x[0-9a-f]+)")
_FLOAT = re.compile(r"-?(?:\d+\.\d*(?:e[+-]?\d+)?|inf|nan)")
_OPERAND = re.compile(
    r"%\w+_(?P<register>s\d+) = inlined_call_operand\.(?P<space><no memory space>|\w+) "
    r"\[shape: (?P<shape>\w+\[[^\]]*\])[^\]]*?, index: (?P<index>\d+), kind: (?P<kind>\w+)"
)
_MATRIX = re.compile(
    r"(?P<op>vmatmul|vmatpush|vmatprep|vpop)(?P<form>[\w.]*?)(?:mrb\[(?P<entry>\d+)\]\.)?\.?mxu(?P<unit>\d)"
)
_MATRIX_KINDS: dict[str, Literal["push", "multiply", "pop"]] = {
    "vmatmul": "multiply",
    "vmatpush": "push",
    "vpop": "pop",
}


def parse_bundles(text: str) -> Schedule:
    """The schedule that `text` is the dump of.

    Raises:
        SimulationError: There is no bundle in it, or a scalar instruction that is not known.
    """
    start = text.find(_PREAMBLE_END) + 1
    marks = list(_BUNDLE.finditer(text, max(start, 0)))
    if not marks:
        raise SimulationError("the compiler's dump of the kernel holds no bundles")
    bundles = []
    line, counted = 1, 0
    for place, mark in enumerate(marks):
        end = marks[place + 1].start() if place + 1 < len(marks) else len(text)
        line += text.count("\n", counted, mark.end())
        counted = mark.end()
        bundles.append(_bundle(mark[0], text[mark.end() : end], line))
    return Schedule(tuple(bundles), tuple(_operands(text[start : marks[1].start() if marks[1:] else None])))


def _operands(entry: str) -> Iterator[KernelOperand]:
    spaces: dict[str, Literal["hbm", "vmem", "smem", "value"]] = {
        "hbm": "hbm",
        "vmem": "vmem",
        "smem": "smem",
        "<no memory space>": "value",
    }
    for match in _OPERAND.finditer(entry):
        if match["space"] not in spaces:
            raise SimulationError(
                f"operand {match['index']} of the kernel is in {match['space']}, which is not known"
            )
        output = match["kind"] == "output"
        yield KernelOperand(
            int(match["index"]), match["register"], spaces[match["space"]], match["shape"], output
        )


def _bundle(head: str, body: str, line: int) -> Bundle:
    text = _COMMENT.sub("", _GENERAL_DMA.sub(r"dma.\2_to_\3\1", body) if "dma.general" in body else body)
    scalar: list[ScalarOp] = []
    matrix: list[MatrixOp] = []
    guards: set[Register | None] = set()
    for instruction in text[: text.rfind("}")].split(";;"):
        stripped = instruction.strip()
        if not stripped:
            continue
        if not _PSEUDO.search(stripped):
            guard = _GUARD.search(stripped)
            guards.add(_register(guard[1]) if guard else None)
        if "mxu" in stripped and (match := _MATRIX.search(stripped)):
            if match["op"] in _MATRIX_KINDS:
                matrix.append(_matrix_op(match))
        elif not stripped.startswith("%v") or not _VECTOR_DEST.match(stripped):
            op = _scalar_op(stripped, line)
            if op is not None:
                scalar.append(op)
    return Bundle(
        scalar=tuple(scalar),
        matrix=tuple(matrix),
        labelled=_LABEL.search(head) is not None,
        depth=head.count(">"),
        starts=tuple(int(number) for number in _START.findall(body)) if "region" in body else (),
        guards=frozenset(guards),
        line=line,
    )


def _matrix_op(match: re.Match[str]) -> MatrixOp:
    form = match["form"]
    return MatrixOp(
        kind=_MATRIX_KINDS[match["op"]],
        unit=int(match["unit"]),
        float32=".f32." in f"{form}.",
        latches="vlgmr" in form or "dwg" in form,
        entry=int(match["entry"]) if match["entry"] else None,
    )


def _scalar_op(text: str, line: int) -> ScalarOp | None:
    """None for an instruction that has no part in control or DMA."""
    match = _INSTRUCTION.fullmatch(text)
    if match is None:
        raise SimulationError(f"line {line} of the kernel's bundles cannot be read: {text[:80]!r}")
    op = match["op"].rstrip(".")
    if op in IGNORED or (op.startswith("v") and op not in SCALAR_OPS):
        return None
    if op not in SCALAR_OPS:
        raise SimulationError(
            f"the kernel has a scalar instruction that the simulator does not know: {op!r} in line {line} of its "
            f"bundles ({text[:100]!r})"
        )
    try:
        guard, old, rest = _guarded(_NOTE.sub("", match["rest"]).strip())
        dest = _register(match["dest"]) if match["dest"] and _REGISTER.fullmatch(match["dest"]) else None
        # Where a value comes from does not matter if it is not known anyhow.
        args = () if op in UNKNOWN else tuple(_argument(part) for part in _parts(rest))
        return ScalarOp(op, dest, args, guard, old, line)
    except ValueError as error:
        raise SimulationError(
            f"line {line} of the kernel's bundles cannot be read: {error} in {text[:100]!r}"
        ) from error


def _guarded(rest: str) -> tuple[Register | None, Register | None, str]:
    if match := _GUARD_FIRST.fullmatch(rest):
        old = _register(match["old"]) if match["old"] else None
        return _register(match["guard"]), old, match["rest"]
    if match := _GUARD_STORE.fullmatch(rest):
        return _register(match["guard"]), None, f"{match['rest']} {match['value']}"
    if match := _GUARD_LAST.fullmatch(rest):
        old = _register(match["old"]) if match["old"] else None
        return _register(match["guard"]), old, match["rest"]
    return None, None, rest


def _parts(text: str) -> Iterator[str]:
    """The arguments, which commas part; after the address that a store writes to, a space does."""
    depth, begin = 0, 0
    for place, character in enumerate(text):
        if character in "[(":
            depth += 1
        elif character in ")]":
            depth -= 1
            if depth == 0 and text.startswith("[smem:", begin) and text[place + 1 : place + 2] == " ":
                yield text[begin : place + 1].strip()
                begin = place + 1
        elif character == "," and depth == 0:
            yield text[begin:place].strip()
            begin = place + 1
    if last := text[begin:].strip():
        yield last


def _register(text: str) -> Register:
    match = _REGISTER.fullmatch(text)
    if match is None:
        raise ValueError(f"no scalar register: {text!r}")
    return Register(match["value"], match["register"], bool(match["negated"]))


def _argument(text: str) -> Argument:
    if text.startswith("[smem:"):
        return Address(tuple(_term(part) for part in _terms(text[len("[smem:") : -1])))
    if _REGISTER.fullmatch(text):
        return _register(text)
    # What an address of a memory points into is told behind it; a value's own name is not needed.
    base = text.split(" [#")[0]
    if text.startswith("[#"):
        base = text
    if match := _SYMBOL.fullmatch(base):
        return Symbol(match["name"], int(match["offset"] or "0", 0))
    if match := _INTEGER.fullmatch(base):
        return _signed(int(match[1], 0))
    if _FLOAT.fullmatch(base):
        return float(base)
    if base.startswith("%"):
        return _register(base)
    if match := re.fullmatch(r"target = \$region(\d+)", base):
        return int(match[1])
    raise ValueError(f"no operand: {text!r}")


def _terms(text: str) -> list[str]:
    stripped = text.strip()
    if stripped.startswith("[") and stripped.endswith("]"):
        stripped = stripped[1:-1]
    return [part.strip().strip("[]") for part in stripped.split(" + ")]


def _term(text: str) -> Register | Symbol | int:
    argument = _argument(f"[{text}]" if text.startswith("#") else text)
    if isinstance(argument, (Register, Symbol, int)):
        return argument
    raise ValueError(f"no address: {text!r}")


def _signed(value: int) -> int:
    return ((value + 0x80000000) & 0xFFFFFFFF) - 0x80000000
