"""How much of each of the core's units a kernel's bundles use, by the compiler's own count."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...errors import SimulationError

# The columns of the compiler's table by the unit they stand for. Fills and spills are among loads and stores.
_COLUMNS = {
    "VPU": "VALU",
    "EUP": "EUP",
    "XLU": "XLU",
    "load": "VLOAD",
    "store": "VSTORE",
    "scalar": "SALU",
}
_MULTIPLY = "MATMUL"
_SCALAR = "SALU"


@dataclass(frozen=True)
class Utilization:
    """The slots that each bundle uses.

    Attributes:
        slots: [bundles, columns].
        columns: Names, as the compiler writes them.
        capacity: Slots of a bundle, by column.
    """

    slots: np.ndarray
    columns: tuple[str, ...]
    capacity: tuple[int, ...]

    @property
    def matrix_units(self) -> int:
        """How many matrix units the core has."""
        return self.capacity[self.columns.index(_MULTIPLY)]

    def computes(self) -> np.ndarray:
        """Which bundles use more than the scalar unit: [bundles] of bool."""
        others = [place for place, name in enumerate(self.columns) if name != _SCALAR]
        return np.asarray(self.slots[:, others].any(axis=1))

    def busy(self, runs: np.ndarray) -> dict[str, float]:
        """By unit, the cycles' worth of work in bundles that are run as often as `runs` says: [bundles]."""
        used = runs @ self.slots
        return {
            unit: float(used[place]) / self.capacity[place]
            for unit, column in _COLUMNS.items()
            for place in [self.columns.index(column)]
        }


def parse_utilization(text: str, bundles: int) -> Utilization:
    """Reads the compiler's table of a kernel with so many bundles.

    Raises:
        SimulationError: It is no such table.
    """
    lines = text.splitlines()
    try:
        columns = tuple(name.strip() for name in lines[1].split(","))
        capacity = tuple(int(number) for number in lines[2].split())
        slots = np.array([[int(n) for n in line.split()] for line in lines[4:] if line.strip()])
    except (IndexError, ValueError) as error:
        raise SimulationError(f"the compiler's table of utilization cannot be read: {error}") from error
    if slots.shape != (bundles, len(columns)):
        raise SimulationError(
            f"the compiler's table of utilization is of {slots.shape[0]} bundles; the kernel has {bundles}"
        )
    return Utilization(slots, columns, capacity)
