"""How a model is split over chips."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ProjectionError

_NAME = re.compile(r"(?:tp(?P<tp>[1-9]\d*))?(?:ep(?P<ep>[1-9]\d*))?")


@dataclass(frozen=True)
class ParallelPlan:
    """A split over `tp * ep` chips.

    Attributes:
        tp: Chips that share each weight matrix: the heads of attention, the columns of each expert.
        ep: Groups of chips that have different experts. Attention is the same in each group.
    """

    tp: int = 1
    ep: int = 1

    @property
    def chips(self) -> int:
        return self.tp * self.ep

    @property
    def transformers(self) -> str | None:
        """How `from_pretrained` is asked for it; None where transformers cannot be."""
        if self.chips == 1:
            return "no distributed_config"
        if self.tp > 1 and self.ep > 1:
            return None
        return f'distributed_config=tpu_kernels.distributed_config(model, "{self}")'

    def __str__(self) -> str:
        return "".join(f"{name}{n}" for name, n in (("tp", self.tp), ("ep", self.ep)) if n > 1) or "tp1"


ONE_CHIP = ParallelPlan()


def parse_plan(name: str) -> ParallelPlan:
    """Reads `ep8`, `tp8`, `tp4ep2`; `tp1` is one chip.

    Raises:
        ProjectionError: It is no plan.

    Example:
        >>> parse_plan("tp4ep2")
        ParallelPlan(tp=4, ep=2)
    """
    match = _NAME.fullmatch(name)
    if match is None or not name:
        raise ProjectionError(f"{name!r} is no parallel plan; give one such as tp1, ep8, tp8 or tp4ep2")
    return ParallelPlan(int(match["tp"] or 1), int(match["ep"] or 1))
