"""What checking a kernel found, as data, as text, and as JUnit XML."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "note"]
Status = Literal["passed", "failed", "not run"]


@dataclass(frozen=True)
class Figure:
    """A figure for the kernel's card.

    Attributes:
        call: What was called.
        generation: On which TPU.
        value: With its unit, and how it came about.
    """

    call: str
    generation: str
    value: str


@dataclass(frozen=True)
class Finding:
    """One thing that a check has to say.

    Attributes:
        level: An `error` fails the check; a `warning` may surprise; a `note` tells.
        message: What is wrong, with the value, the limit and the way out.
        file: In the kernel's source, where that is known; with `line`.
        figure: What of it belongs on the card.
    """

    level: Level
    message: str
    file: str | None = None
    line: int | None = None
    figure: Figure | None = None

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " if self.line else f"{self.file}: " if self.file else ""
        return f"{self.level}: {where}{self.message}"


@dataclass(frozen=True)
class Outcome:
    """What one check came to.

    Attributes:
        check: Its name.
        status: `not run` is no pass: the findings say why.
        findings: What it has to say.
        seconds: It took.
    """

    check: str
    status: Status
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """What all checks came to. ``print(report)`` shows it.

    Attributes:
        kernel: The kernel's name, or the folder's where that cannot be read.
        outcomes: Of each check, in order.
        id: Of the build that was checked; None where it cannot be built.
    """

    kernel: str
    outcomes: Sequence[Outcome]
    id: str | None = None

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(outcome.status != "failed" for outcome in self.outcomes)

    def outcome(self, check: str) -> Outcome:
        """What the check of that name came to."""
        return next(outcome for outcome in self.outcomes if outcome.check == check)

    def __str__(self) -> str:
        lines = []
        for outcome in self.outcomes:
            took = f" ({outcome.seconds:.1f} s)" if outcome.status != "not run" else ""
            lines.append(f"{outcome.check:<12} {outcome.status}{took}")
            lines += [f"  {finding}" for finding in outcome.findings]
        failed = [outcome.check for outcome in self.outcomes if outcome.status == "failed"]
        left = sum(outcome.status == "not run" for outcome in self.outcomes)
        verdict = f"failed: {', '.join(failed)}" if failed else "passed"
        return "\n".join([*lines, f"{self.kernel}: {verdict}" + (f"; {left} not run" if left else "")])

    def to_junit(self) -> bytes:
        """The report as JUnit XML, a test case a check."""
        statuses = Counter(outcome.status for outcome in self.outcomes)
        suite = ElementTree.Element(
            "testsuite",
            name=f"tpu-kernels check {self.kernel}",
            tests=str(len(self.outcomes)),
            time=f"{sum(outcome.seconds for outcome in self.outcomes):.3f}",
            failures=str(statuses["failed"]),
            skipped=str(statuses["not run"]),
        )
        for outcome in self.outcomes:
            case = ElementTree.SubElement(
                suite, "testcase", classname=self.kernel, name=outcome.check, time=f"{outcome.seconds:.3f}"
            )
            text = "\n".join(map(str, outcome.findings))
            if outcome.status == "failed":
                first = next(each for each in outcome.findings if each.level == "error")
                ElementTree.SubElement(case, "failure", message=str(first)).text = text
            elif outcome.status == "not run":
                ElementTree.SubElement(case, "skipped", message=text)
            elif text:
                ElementTree.SubElement(case, "system-out").text = text
        document: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
        return document
