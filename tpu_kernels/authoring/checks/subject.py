"""The kernel that is checked."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ...hub import get_local_kernel
from ...hub.layout import VARIANT
from ..examples import Example, declared
from ..project import Project, read_project
from .report import Finding

_DEFAULT_GENERATION = "v6e"


class NotRun(Exception):
    """A check cannot be made here; the message says why. It is not passed."""


@dataclass(frozen=True)
class Subject:
    """A kernel's source and its build.

    Attributes:
        source: The folder of the source.
        build: The folder of the build, a Hub repository.
        quick: Whether checks may look at a part only.
    """

    source: Path
    build: Path
    quick: bool = False

    @functools.cached_property
    def project(self) -> Project:
        """The source, read."""
        return read_project(self.source)

    @functools.cached_property
    def module(self) -> ModuleType:
        """The kernel, loaded."""
        return get_local_kernel(self.build)

    @property
    def generations(self) -> tuple[str, ...]:
        """The TPU generations that the kernel claims."""
        return tuple(self.project.config.tpu.generations) if self.project.config.tpu else ()

    @property
    def generation(self) -> str:
        """The one that it is interpreted for."""
        claimed = self.generations or (_DEFAULT_GENERATION,)
        return _DEFAULT_GENERATION if _DEFAULT_GENERATION in claimed else claimed[-1]

    def dtypes(self, op: Any) -> tuple[str, ...]:
        """The dtypes that the kernel declares for an op."""
        ops = self.project.config.tpu.ops if self.project.config.tpu else {}
        return tuple(ops[op.__name__].dtypes) if op.__name__ in ops else ()

    @functools.cached_property
    def examples(self) -> list[Example]:
        """The kernel's examples.

        Raises:
            NotRun: It has none.
        """
        found = declared(self.module)
        if not found:
            raise NotRun("the kernel declares no examples: its cases.py has no function examples()")
        return found

    def some(self, examples: list[Example]) -> list[Example]:
        """All of the examples, or in a quick check the first of each op."""
        return (
            list({each.op.__name__: each for each in reversed(examples)}.values()) if self.quick else examples
        )

    def error(self, message: str, at: Any = None) -> Finding:
        """An error at a function, or at the line of the kernel where an exception was raised."""
        file, line = self._place(at)
        return Finding("error", message, file, line)

    def locate(self, path: str, line: int | None) -> tuple[str, int | None] | tuple[None, None]:
        """A line of the build as one of the source; nothing where it is none of the kernel's."""
        with contextlib.suppress(ValueError):
            inner = Path(path).resolve().relative_to((self.build / "build" / VARIANT).resolve())
            package = Path("torch-ext", self.project.config.general.python_name)
            if (self.source / package / inner).exists():
                return str(package / inner), line
        return None, None

    def line_in(self, file: str, text: str) -> int | None:
        """The first line of a file of the source that begins with `text`."""
        lines = (self.source / file).read_text(encoding="utf-8").splitlines()
        return next((number for number, line in enumerate(lines, 1) if line.startswith(text)), None)

    def _place(self, at: Any) -> tuple[str, int | None] | tuple[None, None]:
        if isinstance(at, BaseException):
            for frame in reversed(traceback.extract_tb(at.__traceback__)):
                place = self.locate(frame.filename, frame.lineno)
                if place[0] is not None:
                    return place
            return None, None
        code = getattr(inspect.unwrap(getattr(at, "func", at)), "__code__", None) if at is not None else None
        return self.locate(code.co_filename, code.co_firstlineno) if code else (None, None)


@contextlib.contextmanager
def guarded(subject: Subject, example: Example, findings: list[Finding]) -> Iterator[None]:
    """Turns what an example raises into a finding, so that the other examples are still looked at."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  whatever a kernel raises is the answer
        findings.append(subject.error(f"{example.name}: {describe(error)}", error))


# How a callback's own exception ends the message of the one that JAX makes of it.
_INNER = re.compile(r"^(\w+(?:Error|Exception): .*)", re.MULTILINE)
_LONGEST = 400


def describe(error: BaseException) -> str:
    """An exception in one line."""
    inner = _INNER.findall(str(error)) if "Traceback" in str(error) else []
    if inner:
        return str(inner[-1])[:_LONGEST]
    text = " ".join(str(error).split("\n\n")[0].split())
    return f"{type(error).__name__}: {text[:_LONGEST]}" if text else type(error).__name__
