"""`tpu-kernels doctor`: what is here, what is missing, and what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..doctor import Finding, examine
from .output import AsJson, print_json, progress, show

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    offline: Annotated[
        bool, typer.Option("--offline", help="Send no request to the Hub or a bucket.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check packages, TPU, settings, sources and caches.

    Example: tpu-kernels doctor --offline

    Opens no TPU, and takes some seconds. Exit status 1 if a problem stops kernels from loading.
    """
    with progress("examining", None) as begin:
        findings = list(examine(offline=offline, on_section=begin))
    problems = sum(finding.level == "problem" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if as_json:
        print_json(findings=findings, problems=problems, warnings=warnings)
    else:
        show(*_lines(findings))
        show(f"\nproblems: {problems}, warnings: {warnings}")
    raise typer.Exit(1 if problems else 0)


def _lines(findings: list[Finding]) -> Iterator[Text]:
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            yield Text(f"\n{section}", style="bold")
        text = Text(f"{finding.subject}: ", style="bold").append(finding.message, style="not bold")
        if finding.remedy:
            text.append(f"\ndo: {finding.remedy}", style="not bold")
        head = Text(f"  {finding.level:<8} ", style=_STYLES[finding.level])
        for line in _wrapped(text, len(head)):
            yield head + line
            head = Text(" " * len(head))


def _wrapped(text: Text, indent: int) -> Iterable[Text]:
    """The lines of `text`, those that are too long for a terminal in several; a file takes them as they are."""
    if not sys.stdout.isatty():
        return text.split("\n")
    console = Console()
    return text.wrap(console, max(console.width - indent, 20))
