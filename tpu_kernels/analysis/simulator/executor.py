"""Follows a kernel's control flow, given the integers it depends on."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import SimulationError
from .blocks import Block
from .codegen import END, CodeGenerator
from .ir import Address, Argument, Schedule, Symbol
from .semantics import unsigned, wrap
from .trace import Action, Event, Trace
from .values import Pointer, Unknown, choose, floating

_LONGEST_RUN = 50_000_000  # blocks
_ALLOCATION = 1 << 20  # the addresses of an allocation are further apart than any offset
_CORE_INDEX = "allocation0"  # which core of the chip it is
_WORD, _LANES = 4, 128


class _ScalarMemory(dict[int, Any]):
    """Words by their address."""

    def __init__(self, addresses: Mapping[str, int]) -> None:
        super().__init__()
        self._names = {address // _ALLOCATION: name for name, address in addresses.items()}

    def __setitem__(self, address: int | Unknown, value: Any) -> None:
        # (An unknown address says so when it is made a number.)
        super().__setitem__(int(address), value)

    def __missing__(self, address: int | Unknown) -> Unknown:
        if isinstance(address, Unknown):
            return address
        name = self._names.get(address // _ALLOCATION, "an operand")
        return Unknown(f"scalar memory that nothing was written to (word {address % _ALLOCATION} of {name})")


def run(
    schedule: Schedule,
    blocks: Sequence[Block],
    data: Mapping[int, Sequence[int]],
    copied: Sequence[Sequence[int] | None] = (),
    *,
    granule: int,
    names: Sequence[str],
    core: int = 0,
) -> Trace:
    """Runs the scalar side of a kernel.

    Args:
        schedule: The kernel.
        blocks: Its basic blocks.
        data: The integers that operands hold, flat, by the operand's index.
        copied: What each DMA from vector to scalar memory brings, in order; None where that is not known.
        granule: Bytes that a DMA counts in.
        names: Of the operands and results, for messages.
        core: Which of the chip's cores it is.

    Raises:
        SimulationError: Where it goes depends on something that is not known, or it does not end.
    """
    machine = _Machine(schedule, data, copied, granule, names, core)
    machine.execute(blocks)
    return Trace(machine.steps, machine.events, machine.delays)


def asks_for_core(schedule: Schedule) -> bool:
    """Whether a program asks which of the chip's cores runs it."""
    return _CORE_INDEX in _allocate(schedule)


class _Machine:
    def __init__(
        self,
        schedule: Schedule,
        data: Mapping[int, Sequence[int]],
        copied: Sequence[Sequence[int] | None],
        granule: int,
        names: Sequence[str],
        core: int,
    ) -> None:
        self.steps = array("I")
        self.events: list[Event] = []
        self.delays: dict[int, int] = {}
        self._bundles = schedule.bundles
        self._data = data
        self._copied = iter(copied)
        self._words = granule // _WORD
        self._names = names
        self._addresses = _allocate(schedule)
        self._memory = _ScalarMemory(self._addresses)
        self._registers: dict[str, Any] = {}
        for operand in schedule.operands:
            value: Any
            if operand.space == "value":
                value = data[operand.index][0] if operand.index in data else self._unbound(operand.index)
            elif operand.space == "smem":
                value = _ALLOCATION * (len(self._addresses) + 1 + operand.index)
                self._fill(value, operand.index, 0, None)
            else:
                value = Pointer(operand.index, operand.space == "hbm")
            self._registers[operand.register] = value
        if _CORE_INDEX in self._addresses:
            self._memory[self._addresses[_CORE_INDEX]] = core

    def execute(self, blocks: Sequence[Block]) -> None:
        generator = CodeGenerator(self._addresses)
        scope: dict[str, Any] = {
            "M": self._memory,
            "U": unsigned,
            "Unknown": Unknown,
            "dma": self._dma,
            "choose": choose,
            "delay": self._delay,
            "floating": floating,
            "reset": self._reset,
            "signal": self._signal,
            "store": self._store,
            "wait": self._wait,
            "wrap": wrap,
            "taken": False,
        }
        registers = {op.dest.physical for block in blocks for ops in block.needed for op in ops if op.dest}
        scope |= dict.fromkeys(registers, Unknown("a register that nothing was written to"))
        scope |= self._registers
        # The compiler's own text went through a strict parser: only known expressions over numbers and registers.
        exec(generator.compiled(blocks), scope)
        functions = [scope[f"block_{place}"] for place in range(len(blocks))]
        steps, place = self.steps, 0
        try:
            while place != END:
                steps.append(place)
                place = functions[place]()
                if len(steps) > _LONGEST_RUN:
                    raise SimulationError(
                        f"the kernel does not end within {_LONGEST_RUN} blocks; its loops may be bound by integers "
                        f"that are not plausible"
                    )
        except SimulationError as error:
            line = self._bundles[blocks[steps[-1]].start].line
            raise SimulationError(f"{error} (near line {line} of its bundles)") from error
        except TypeError as error:
            line = self._bundles[blocks[steps[-1]].start].line
            raise SimulationError(
                f"the kernel computes with an address in a way that cannot be followed, near line {line} of its "
                f"bundles: {error}"
            ) from error

    def _unbound(self, operand: int) -> Unknown:
        name = self._names[operand]
        return Unknown(f"the integers of {name}, which are not given; give them with data=")

    def _fill(self, address: int, operand: int, first: int, count: int | None) -> None:
        """Writes what an operand holds into scalar memory, `count` words of it or all."""
        if operand not in self._data:
            unbound = self._unbound(operand)
            self._memory.update({address + place: unbound for place in range(count or _ALLOCATION >> 4)})
            return
        values = self._data[operand]
        for place, value in enumerate(values[first : None if count is None else first + count]):
            self._memory[address + place] = wrap(int(value))

    def _dma(self, offset: int, way: str, source: Any, amount: int, destination: Any, semaphore: int) -> None:
        if way.endswith("_to_smem"):
            self._load(source, amount, destination)
        operand, write = None, False
        if isinstance(source, Pointer) and source.hbm:
            operand = source.operand
        elif isinstance(destination, Pointer) and destination.hbm:
            operand, write = destination.operand, True
        elif "hbm" in way or way == "general":
            raise SimulationError(f"a DMA ({way}) has an address in HBM that is of no operand")
        self._event("dma", offset, semaphore, amount, operand, write)

    def _load(self, source: Any, amount: int, destination: int) -> None:
        """Integers on their way into scalar memory."""
        count = amount * self._words
        if not isinstance(source, Pointer):
            copied = next(self._copied, None)
            if copied is None:
                unknown = Unknown(
                    "scalar memory that was copied from vector memory, where what is in it is not known; it is found "
                    "where a kernel without a grid copies a whole buffer, outside of loops and branches, that holds "
                    "what is made of operands that data= gives"
                )
                self._memory.update({destination + place: unknown for place in range(count)})
            elif len(copied) > count or count - len(copied) >= _LANES:
                raise SimulationError(
                    f"a copy of {count} words from vector to scalar memory is not the one of {len(copied)} that the "
                    f"function has in its place"
                )
            else:
                self._memory.update({destination + place: wrap(value) for place, value in enumerate(copied)})
        elif isinstance(source.offset, Unknown):
            self._memory.update({destination + place: source.offset for place in range(count)})
        else:
            self._fill(destination, source.operand, source.offset * self._words, count)

    def _store(self, predicate: bool | Unknown, address: int, value: Any) -> None:
        if predicate is True:
            self._memory[address] = value
        elif isinstance(predicate, Unknown):
            self._memory[address] = predicate

    def _signal(self, offset: int, semaphore: int, amount: int) -> None:
        self._event("signal", offset, semaphore, amount)

    def _reset(self, offset: int, semaphore: int, amount: int) -> None:
        self._event("reset", offset, semaphore, amount)

    def _wait(self, offset: int, semaphore: int, amount: int) -> None:
        self._event("wait", offset, semaphore, amount)

    def _delay(self, offset: int, cycles: int) -> None:
        step = len(self.steps) - 1
        self.delays[step] = self.delays.get(step, 0) + cycles

    def _event(
        self,
        action: Action,
        offset: int,
        semaphore: Any,
        amount: Any,
        operand: int | None = None,
        write: bool = False,
    ) -> None:
        # (An unknown value says what it is when it is made a number.)
        self.events.append(
            Event(action, len(self.steps) - 1, offset, int(semaphore), int(amount), operand, write)
        )


def _allocate(schedule: Schedule) -> dict[str, int]:
    """An address for each allocation of any memory."""
    found: dict[str, int] = {}
    for bundle in schedule.bundles:
        for op in bundle.scalar:
            for argument in op.args:
                for symbol in _symbols(argument):
                    found.setdefault(symbol.allocation, (len(found) + 1) * _ALLOCATION)
    return found


def _symbols(argument: Argument) -> list[Symbol]:
    terms = argument.terms if isinstance(argument, Address) else (argument,)
    return [term for term in terms if isinstance(term, Symbol)]
