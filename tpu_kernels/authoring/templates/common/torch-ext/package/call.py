"""A named call of an op."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of one of the kernel's ops.

    Attributes:
      op: name of the op.
      part: the call's name.
      arguments: arrays by name: a pair of shape and dtype, or (nested) lists of integers that count.
      static: other arguments.
    """

    op: str
    part: str
    arguments: dict[str, Any]
    static: dict[str, Any] = dataclasses.field(default_factory=dict)
