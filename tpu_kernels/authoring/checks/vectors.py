"""Whether a kernel's golden vectors are those of its examples, and what the CPU makes of them."""

from __future__ import annotations

from collections.abc import Iterator

from ..golden import GOLDEN_FILE, make_golden, read_golden, run_golden
from .report import Finding
from .subject import NotRun, Subject


def check_golden(subject: Subject) -> Iterator[Finding]:
    """Golden vectors: up to date, and right on the CPU."""
    content = read_golden(subject.module)
    if content is None:
        raise NotRun(f"the package has no {GOLDEN_FILE}; make it with: tpu-kernels golden {subject.source}")
    if content != make_golden(subject.module):
        yield subject.error(
            f"{GOLDEN_FILE} is not that of the examples as they are now; make it anew with: tpu-kernels golden "
            f"{subject.source}"
        )
    for vector in run_golden(subject.module, "cpu"):
        if not vector.passed:
            wrong = vector.failure or (vector.difference.wrong if vector.difference else "")
            yield subject.error(f"{vector.name} on the CPU: {wrong}")
