"""What scalar registers hold beside integers: addresses of operands, and values that nobody knows."""

from __future__ import annotations

from typing import Any

from ...errors import SimulationError


class Unknown:
    """A value that the simulation does not have, and why.

    It may be copied and computed with; to branch, compare or address by it is an error.
    """

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def _same(self, *_: Any) -> Unknown:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __rfloordiv__ = _same
    __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __invert__ = _same
    # Comparisons too, so that what nothing branches on does no harm.
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _same  # type: ignore[assignment]
    bit_length = _same

    def __and__(self, other: Any) -> Any:
        return other if isinstance(other, int) and not other else self

    def __or__(self, other: Any) -> Any:
        return True if other is True else self

    __rand__, __ror__ = __and__, __or__

    def _refuse(self) -> Any:
        raise SimulationError(f"the kernel's control flow depends on {self.reason}")

    __bool__ = __index__ = __int__ = _refuse
    __hash__ = object.__hash__  # as an address, which scalar memory tells from others


def choose(predicate: Any, one: Any, other: Any) -> Any:
    """One of two values; where the predicate is not known, neither is the value."""
    return one if predicate is True else other if predicate is False else predicate


_FLOAT = Unknown("a floating-point value")


def floating(*operands: Any) -> Unknown:
    """The result of arithmetic on floating-point values, which is not carried out."""
    return next((x for x in operands if isinstance(x, Unknown) and x is not _FLOAT), _FLOAT)


class Pointer:
    """An address in an operand.

    Attributes:
        operand: The operand's index.
        hbm: It is in HBM, not in a memory of the core.
        offset: In the units of the DMA engine (granules) when a DMA gets it.
    """

    __slots__ = ("hbm", "offset", "operand")

    def __init__(self, operand: int, hbm: bool, offset: int | Unknown = 0) -> None:
        self.operand, self.hbm, self.offset = operand, hbm, offset

    def _at(self, offset: Any) -> Pointer:
        return Pointer(self.operand, self.hbm, offset)

    def __add__(self, other: Any) -> Pointer:
        return self._at(self.offset + other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return self._at(self.offset - other)

    def __and__(self, other: Any) -> Pointer:
        return self._at(self.offset & other)

    __rand__ = __and__

    def __or__(self, other: Any) -> Pointer:
        return self._at(self.offset | other)

    __ror__ = __or__

    def __lshift__(self, other: Any) -> Pointer:
        return self._at(self.offset << other)

    def __rshift__(self, other: Any) -> Pointer:
        return self._at(self.offset >> other)
