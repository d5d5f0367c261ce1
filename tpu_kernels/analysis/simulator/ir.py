"""A kernel's final schedule, typed: very long instruction words ("bundles") of scalar, vector and matrix ops.

Only what decides the time is kept in full: the scalar side (addresses, loops, DMAs, sync flags) and the matrix
unit's instructions. Of other vector ops nothing is kept; they run in lock step with their bundle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Register:
    """A scalar (`s3`) or predicate (`p3`) register.

    Attributes:
        virtual: The value's own name, before registers were assigned.
        physical: The register that holds it.
        negated: The predicate's opposite is meant.
    """

    virtual: str
    physical: str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Symbol:
    """An address within an allocation, in the units of its memory."""

    allocation: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Address:
    """A word of scalar memory, at the sum of these."""

    terms: tuple[Register | Symbol | int, ...]


# (Floats are of constants; nothing is computed with them.)
Argument = Register | Symbol | Address | int | float


@dataclass(frozen=True, slots=True)
class ScalarOp:
    """An instruction of the scalar side.

    Attributes:
        op: As the compiler writes it, e.g. `sadd.s32`.
        dest: What it writes, if a register.
        args: What it reads, but for the guard.
        guard: The predicate under which it is carried out; None: always.
        old: What `dest` holds where the guard does not; None where nobody reads that.
        line: In the compiler's text.
    """

    op: str
    dest: Register | None
    args: tuple[Argument, ...]
    guard: Register | None
    old: Register | None
    line: int


@dataclass(frozen=True, slots=True)
class MatrixOp:
    """An instruction to or from a matrix unit.

    Attributes:
        kind: `push`: rows of the stationary side; `multiply`: rows of the moving side; `pop`: a result.
        unit: Number of the unit.
        float32: The rows hold half as many elements.
        latches: The multiply is the first with newly pushed weights.
        entry: Place of the result in the result buffer, where the unit has one that is addressed.
    """

    kind: Literal["push", "multiply", "pop"]
    unit: int
    float32: bool
    latches: bool
    entry: int | None


@dataclass(frozen=True, slots=True)
class Bundle:
    """The instructions of one cycle.

    Attributes:
        scalar: Read before any of them writes.
        matrix: In the order of the text.
        labelled: The compiler marks it as the body, the end or another target of control flow.
        depth: Of the loops around it.
        starts: Regions that start with it.
        guards: The predicates its instructions are under, vector ops included; None stands for no predicate.
        line: In the compiler's text.
    """

    scalar: tuple[ScalarOp, ...]
    matrix: tuple[MatrixOp, ...]
    labelled: bool
    depth: int
    starts: tuple[int, ...]
    guards: frozenset[Register | None]
    line: int


@dataclass(frozen=True, slots=True)
class KernelOperand:
    """An operand or result of a kernel, as its first bundle declares it.

    Attributes:
        index: Its place among the operands, which the results follow.
        register: Holds its address or, with space `value`, itself.
        space: Where it is.
        shape: As in `bf16[512,2048]`.
        output: It is a result.
    """

    index: int
    register: str
    space: Literal["hbm", "vmem", "smem", "value"]
    shape: str
    output: bool


@dataclass(frozen=True, slots=True)
class Schedule:
    """A kernel: its bundles in the order of their addresses; the last is its end."""

    bundles: tuple[Bundle, ...]
    operands: tuple[KernelOperand, ...]
