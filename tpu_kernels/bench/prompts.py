"""Prompts for a benchmark: rows of equal length, from different places of one text."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from ..errors import BenchmarkError


def read_text(file: Path | None) -> str:
    """The text in `file`, or the one that ships with the package if None."""
    if file is None:
        return resources.files(__package__).joinpath("prompt.txt").read_text(encoding="utf-8")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BenchmarkError(
            f"the prompt file {file} is not UTF-8 text (byte {error.start}); convert it, or give another"
        ) from error
    except OSError as error:
        raise BenchmarkError(
            f"the prompt file {file} cannot be read ({error.strerror}); give another"
        ) from error


def cut_rows(tokens: Sequence[int], rows: int, length: int) -> list[list[int]]:
    """Cuts `rows` pieces of `length` tokens, spread evenly over the text, no two from the same place.

    They overlap where the text is short.

        >>> cut_rows(range(10), rows=3, length=4)
        [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    """
    needed = length + rows - 1
    if len(tokens) < needed:
        raise BenchmarkError(
            f"the prompt text has {len(tokens)} tokens, but batch {rows} with prompt length {length} needs "
            f"{needed}; give a longer text, a shorter prompt length or a smaller batch"
        )
    last = len(tokens) - length
    starts = [row * last // max(rows - 1, 1) for row in range(rows)]
    return [list(tokens[start : start + length]) for start in starts]
