"""The doctor: what is installed, which TPU there is, what stands in the way of kernels, and what to do.

Nothing here opens a TPU or imports torch, jax or transformers in this process, and nothing waits for long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from . import caches, environment, integrations, machine, packages, selftests, sources
from .finding import Finding, Level

__all__ = ["Finding", "Level", "examine"]


def examine(
    *, offline: bool = False, on_section: Callable[[str], None] = lambda name: None
) -> Iterator[Finding]:
    """What there is to say about this machine and this environment, section by section.

    Args:
        offline: Send no request to the Hub or a bucket.
        on_section: Called with the name of each section before it is examined.

    Example:
        >>> [f.subject for f in examine(offline=True) if f.level == "problem"]  # doctest: +SKIP
        []
    """
    sections: dict[str, Callable[[], Iterator[Finding]]] = {
        "packages": packages.examine,
        "machine": machine.examine,
        "environment": environment.examine,
        "sources": lambda: sources.examine(offline=offline),
        "caches": caches.examine,
        "self-tests": selftests.examine,
        "integrations": lambda: integrations.examine(offline=offline),
    }
    for name, section in sections.items():
        on_section(name)
        yield from section()
