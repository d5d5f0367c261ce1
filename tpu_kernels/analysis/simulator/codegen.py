"""Basic blocks as Python functions, which follow a kernel's control flow some hundred times faster than a walk
over its instructions.

The registers are global variables of the generated module; `M` is scalar memory. A function returns the place of
the block that is run next, or -1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import CodeType

from .blocks import Block
from .ir import Address, Argument, Register, ScalarOp, Symbol
from .semantics import EXPRESSIONS, SCALAR_OPS

END = -1
_NAME = re.compile(r"\b[sp]\d+\b")


class CodeGenerator:
    """Generates the functions of a kernel's blocks.

    Args:
        addresses: Where each allocation begins.
    """

    def __init__(self, addresses: Mapping[str, int]) -> None:
        self._addresses = addresses

    def source(self, blocks: Sequence[Block]) -> str:
        """Functions `block_0`, `block_1`, ..."""
        return "\n".join(
            self._function(place, block, END if place + 1 == len(blocks) else place + 1)
            for place, block in enumerate(blocks)
        )

    def compiled(self, blocks: Sequence[Block]) -> CodeType:
        """The functions, compiled."""
        return compile(self.source(blocks), "<kernel>", "exec")

    def _function(self, place: int, block: Block, following: int) -> str:
        lines: list[str] = []
        for offset, ops in enumerate(block.needed):
            lines += self._bundle(ops, offset)
        if block.branch is not None:
            lines.append(f"return {block.target} if taken else {following}")
        else:
            lines.append(f"return {following}")
        names = sorted({name for line in lines for name in _NAME.findall(line)})
        scope = [f"global {', '.join(names)}"] if names else []
        return "\n ".join([f"def block_{place}():", *scope, *lines])

    def _bundle(self, ops: Sequence[ScalarOp], offset: int) -> list[str]:
        """All that is read in a bundle is read before anything is written."""
        loads: list[str] = []
        effects: list[str] = []
        writes: dict[str, str] = {}
        storing = any(SCALAR_OPS[op.op] == "store" for op in ops)
        for op in ops:
            effect = SCALAR_OPS[op.op]
            if effect != "set":
                effects.append(self._effect(op, effect, offset))
                continue
            assert op.dest is not None
            register = op.dest.physical
            arguments = [self._value(argument) for argument in op.args]
            value = EXPRESSIONS[op.op].format(*arguments, arguments=",".join(arguments))
            if op.guard is not None:
                # Under a false predicate the operands may be anything, also what cannot be computed with.
                guard, old = self._value(op.guard), writes.get(register, register)
                value = f"({value} if {guard} is True else choose({guard},None,{old}))"
            if storing and "M[" in value:
                loads.append(f"load{len(loads)}={value}")
                value = f"load{len(loads) - 1}"
            writes[register] = value
        assigned = f"{','.join(writes)}={','.join(writes.values())}"
        return [*loads, *effects, *([assigned] if writes else [])]

    def _effect(self, op: ScalarOp, effect: str, offset: int) -> str:
        arguments = [self._value(argument) for argument in op.args]
        if effect == "branch":
            return f"taken={self._value(op.guard)}" if op.guard is not None else "taken=True"
        if effect == "store":
            address, value = arguments
            if op.guard is None:
                return f"M[{address}]={value}"
            return f"store({self._value(op.guard)},{address},{value})"
        else:
            # (The way of a DMA is in its name; its fifth and later arguments are about strides.)
            way = [repr(op.op.removeprefix("dma."))] if effect == "dma" else []
            statement = f"{effect}({','.join([str(offset), *way, *arguments[:4]])})"
        return f"if {self._value(op.guard)}: {statement}" if op.guard is not None else statement

    def _value(self, argument: Argument) -> str:
        if isinstance(argument, Register):
            return f"({argument.physical}^True)" if argument.negated else argument.physical
        if isinstance(argument, Symbol):
            return str(self._addresses[argument.allocation] + argument.offset)
        if isinstance(argument, Address):
            return "+".join(map(self._value, argument.terms))
        return "floating()" if isinstance(argument, float) else str(argument)
