"""The checks, in the order they are made in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from .compiles import check_compile, check_speed
from .declaration import check_declaration
from .gradients import check_gradients
from .layout import check_layout
from .lint import check_lint
from .memory import check_memory
from .numerics import check_numerics
from .report import Finding, Outcome
from .stock import check_stock
from .subject import NotRun, Subject, describe
from .torch_side import check_emulated, check_torch
from .vectors import check_golden

Place = Literal["here", "process", "emulated", "stock"]


@dataclass(frozen=True)
class Check:
    """One question to a kernel.

    Attributes:
        name: The check's.
        ask: Looks at the kernel.
        place: Where it is asked: those that run none of the kernel's code `here`; the others in a `process`, which
            those of the same kind share. An `emulated` TPU and `stock` kernels want one of their own.
        quick: Whether a quick check asks it too.
    """

    name: str
    ask: Callable[[Subject], Iterable[Finding]]
    place: Place = "process"
    quick: bool = True

    def run(self, subject: Subject) -> Outcome:
        """What it comes to; whatever it raises is a finding."""
        start = time.perf_counter()
        findings: list[Finding] = []
        try:
            for finding in self.ask(subject):
                findings.append(finding)
        except NotRun as reason:
            findings.append(Finding("note", str(reason)))
            if not _failed(findings):
                return Outcome(self.name, "not run", tuple(findings))
        except Exception as error:  # noqa: BLE001  a check that breaks is a finding, and no end of the others
            findings.append(subject.error(f"the check broke: {describe(error)}", error))
        status: Literal["failed", "passed"] = "failed" if _failed(findings) else "passed"
        return Outcome(self.name, status, tuple(findings), time.perf_counter() - start)


def _failed(findings: list[Finding]) -> bool:
    return any(finding.level == "error" for finding in findings)


CHECKS = (
    Check("layout", check_layout, "here"),
    Check("lint", check_lint, "here"),
    Check("declaration", check_declaration),
    Check("numerics", check_numerics),
    Check("gradients", check_gradients),
    Check("memory", check_memory),
    Check("compile", check_compile),
    Check("torch", check_torch),
    Check("golden", check_golden),
    Check("speed", check_speed, quick=False),
    Check("emulated", check_emulated, "emulated", quick=False),
    Check("stock", check_stock, "stock"),
)
