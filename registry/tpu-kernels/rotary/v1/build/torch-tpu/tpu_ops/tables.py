"""Tuned configs: which one a problem is solved with, and where they are kept.

A *problem* is what a kernel has several ways to solve: an operation on shapes. `choose` picks the way::

    the user's table, then the kernel's own ──> nearest entry that fits ──> else the kernel's own first candidate

Tables are JSON, one for each generation: `tuned/<generation>.json` in the kernel's package, written by its author and
built into it; and one of the user's, for this very build, in the cache of `tpu-kernels`. An entry serves problems of
its operation and variant whose dimensions are all within half an octave of its own. This module travels in kernels.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

# The longest way from an entry to a problem, on each axis: half a power of two.
REACH = 0.5
FOLDER = "tuned"

_logger = logging.getLogger("tpu_kernels")


class Problem(Protocol):
    """What a config is chosen for. Immutable and hashable; configs are dataclasses of numbers, strings and bools.

    Attributes:
      operation: names the kernel function.
      dimensions: sizes that an entry need not share exactly, all at least 1.
      variant: what it must share exactly: dtypes, layouts.
    """

    def __hash__(self) -> int: ...

    @property
    def operation(self) -> str: ...

    @property
    def dimensions(self) -> Mapping[str, int]: ...

    @property
    def variant(self) -> Mapping[str, Any]: ...

    def candidates(self, tpu: str) -> Sequence[Any]:
        """The configs to choose from on a generation, likeliest best first; at least one."""

    def fitting(self, values: Mapping[str, Any], tpu: str) -> Any | None:
        """The config with these values; None if it does not solve this problem on that generation."""

    def program(self, config: Any) -> tuple[Any, Mapping[str, Any]]:
        """A JAX function that solves the problem in one way, and the shapes of its arguments by name.

        Integer arguments have the names they have in the op: their values are taken from its call.
        """


_recorded: ContextVar[list[Problem] | None] = ContextVar("recorded", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list[Problem]]:
    """Collects the problems that configs are chosen for."""
    found: list[Problem] = []
    token = _recorded.set(found)
    try:
        yield found
    finally:
        _recorded.reset(token)


def choose(problem: Problem, tpu: str) -> Any:
    """The config for a problem on a generation: the nearest tuned one that fits, else the first candidate."""
    found = _recorded.get()
    if found is not None and problem not in found:
        found.append(problem)
    return _choice(problem, tpu)


@functools.lru_cache(maxsize=4096)
def _choice(problem: Problem, tpu: str) -> Any:
    for entry in nearest(entries(package_of(problem), tpu), problem):
        config = problem.fitting(entry["config"], tpu)
        if config is not None:
            return config
    return problem.candidates(tpu)[0]


def nearest(table: Sequence[Mapping[str, Any]], problem: Problem) -> list[Mapping[str, Any]]:
    """The entries that may serve a problem, the nearest first; of equally near ones, in the order of the table."""
    near = []
    for entry in table:
        if entry["operation"] == problem.operation and entry["variant"] == dict(problem.variant):
            ways = distances(entry["dimensions"], problem.dimensions)
            if ways is not None and max(ways, default=0.0) <= REACH:
                near.append((sum(ways), entry))
    return [entry for _, entry in sorted(near, key=lambda each: each[0])]


def distances(one: Mapping[str, int], other: Mapping[str, int]) -> list[float] | None:
    """How far apart dimensions are, in octaves; None if they are not the same ones."""
    if one.keys() != other.keys():
        return None
    return [abs(math.log2(one[name] / other[name])) for name in one]


@functools.cache
def entries(package: str, tpu: str) -> list[Mapping[str, Any]]:
    """The entries for a generation: the user's, then those that came with the kernel."""
    found: list[Mapping[str, Any]] = []
    with contextlib.suppress(OSError):
        found += parse(user_file(package, tpu).read_bytes(), str(user_file(package, tpu)))
    with contextlib.suppress(OSError):
        # Through the loader, which reads the bytes that were verified.
        found += parse(pkgutil.get_data(package, f"{FOLDER}/{tpu}.json") or b"[]", package)
    return found


def parse(text: bytes, origin: str) -> list[Mapping[str, Any]]:
    """The entries of a table; none, with a warning, where it is something else."""
    try:
        table = json.loads(text)
        for entry in table:
            operation, config = entry["operation"], entry["config"]
            if not (
                isinstance(operation, str) and isinstance(config, dict) and isinstance(entry["variant"], dict)
            ):
                raise TypeError("an entry is malformed")
            if not all(type(size) is int and size > 0 for size in entry["dimensions"].values()):
                raise TypeError("an entry's dimensions are no positive integers")
        return list(table)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        _logger.warning("the tuned configs of %s are not used: %s", origin, error)
        return []


def user_file(package: str, tpu: str) -> Path:
    """The user's table for a build of a kernel, whose package is named after its content."""
    cache = os.environ.get("TPU_KERNELS_CACHE")
    root = (
        Path(cache)
        if cache
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpu-kernels"
    )
    return root / FOLDER / package / f"{tpu}.json"


def package_of(problem: Problem) -> str:
    """The kernel that a problem is of: one that another includes has tables of its own."""
    return type(problem).__module__.rpartition(".")[0]
