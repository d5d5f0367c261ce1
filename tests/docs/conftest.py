"""The fenced blocks of the pages, the README and the kernels' cards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CARDS = sorted((ROOT / "kernels_src").glob("*/README.md"))

_BLOCK = re.compile(
    r"(?P<reason><!-- not run: [^\n]* -->\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: Where it is.
        line: Its first line there.
        language: What the fence says.
        text: What is between the fences.
        runs: Whether nothing above it says why it is not run.
    """

    page: Path
    line: int
    language: str
    text: str
    runs: bool


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("text")) + 1
        yield Block(page, line, match["language"], match["text"], match["reason"] is None)


def name(page: Path) -> str:
    """A page's path in the project."""
    return str(page.relative_to(ROOT))
