"""A kernel's card, with the figures that checking it came to."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..analysis.cache import versions
from .checks.report import Figure, Report

_FIGURES = re.compile(r"(<!-- figures -->\n).*?(<!-- /figures -->)", re.DOTALL)


def fill_card(card: bytes, report: Report) -> bytes:
    """The card with the report's figures between its marks, `<!-- figures -->` and `<!-- /figures -->`.

    A card without the marks stays as it is.
    """
    text = "\n".join(_lines(report))
    filled = _FIGURES.sub(lambda marks: f"{marks[1]}{text}\n{marks[2]}", card.decode("utf-8"))
    return filled.encode()


def _lines(report: Report) -> Iterable[str]:
    passed = [outcome.check for outcome in report.outcomes if outcome.status == "passed"]
    left = [outcome.check for outcome in report.outcomes if outcome.status == "not run"]
    yield f"Checked without a TPU: {', '.join(passed)}." + (f" Not run: {', '.join(left)}." if left else "")
    notes = [
        finding
        for outcome in report.outcomes
        for finding in outcome.findings
        if outcome.check in ("numerics", "compile") and finding.level == "note"
    ]
    yield ""
    yield from (f"- {note.message}" for note in notes)
    figures = [f.figure for outcome in report.outcomes for f in outcome.findings if f.figure is not None]
    if figures:
        yield from _table(figures)


def _table(figures: list[Figure]) -> Iterable[str]:
    generations = list(dict.fromkeys(figure.generation for figure in figures))
    values = {(figure.call, figure.generation): figure.value for figure in figures}
    built = ", ".join(f"{name} {version}" for name, version in versions().items())
    yield ""
    yield f"Simulated from the compiler's schedule ({built}); nothing was measured on a TPU:"
    yield ""
    yield f"| call | {' | '.join(generations)} |"
    yield "|---" * (len(generations) + 1) + "|"
    for call in dict.fromkeys(figure.call for figure in figures):
        yield f"| {call} | {' | '.join(values.get((call, each), '') for each in generations)} |"
