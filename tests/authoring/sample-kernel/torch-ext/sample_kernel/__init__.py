"""A kernel for tests: relative imports, a subpackage, a data file, an import inside a function."""

import json
from pathlib import Path

from .numbers import addition

__all__ = ["add", "late", "table"]


def add(left: int, right: int) -> int:
    return addition.add(left, right)


def table() -> dict[str, int]:
    return json.loads((Path(__file__).parent / "table.json").read_text())


def late() -> str:
    from .late import WORD

    return WORD
