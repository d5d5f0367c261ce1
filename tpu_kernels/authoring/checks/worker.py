"""The process in which a kernel's code is run: makes checks and writes down what each came to, a line of JSON each."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import TypeAdapter

from .report import Outcome
from .subject import Subject
from .table import CHECKS

_OUTCOME = TypeAdapter(Outcome)


def outcome_from_json(line: str) -> Outcome:
    """What a worker wrote down."""
    return _OUTCOME.validate_json(line)


def main(source: str, build: str, extent: str, results: str, *names: str) -> None:
    """Makes the checks of these names on a build."""
    subject = Subject(Path(source), Path(build), extent == "quick")
    checks = {check.name: check for check in CHECKS}
    with Path(results).open("a", encoding="utf-8") as file:
        for name in names:
            outcome = checks[name].run(subject)
            file.write(_OUTCOME.dump_json(outcome).decode() + "\n")
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
