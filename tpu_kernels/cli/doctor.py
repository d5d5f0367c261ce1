"""`tpu-kernels doctor`: what is here, what is missing, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer
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
    """Check packages, TPU, settings, sources and caches: tpu-kernels doctor --offline

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
        line = Text(f"  {finding.level:<8} ", style=_STYLES[finding.level])
        line.append(f"{finding.subject}: ", style="bold not dim").append(
            finding.message, style="not bold default"
        )
        yield line
        if finding.remedy:
            yield Text(f"           do: {finding.remedy}")
