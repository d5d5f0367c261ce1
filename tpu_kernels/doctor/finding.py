"""What the doctor finds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

Level = Literal["ok", "warning", "problem"]
T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    A `problem` stops kernels from loading; a `warning` may surprise, or slow things down. `remedy` says what
    to do about either; empty where there is nothing to do.
    """

    section: str
    level: Level
    subject: str
    message: str
    remedy: str = ""


def within(seconds: float, function: Callable[[], T]) -> T:
    """The result of `function`, which is left behind when it takes longer.

    Raises:
        TimeoutError: It took longer.

    Example:
        >>> within(10, lambda: 1 + 1)
        2
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001  raised again by the caller
            errors.append(error)

    # A daemon, so that one that hangs holds nobody up, not even the end of the process.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]
