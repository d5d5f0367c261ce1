"""Whether the installed packages meet a kernel's version ranges, without importing any of them."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

# Needed to run on a TPU only: without them a kernel still runs its reference path on the CPU.
_OPTIONAL = frozenset({"torch-tpu"})
# Not a package, but a kernel may need a version of it as of one.
_PYTHON = "python"


@dataclass(frozen=True)
class UnmetRequirement:
    """A version range that the environment does not meet; `installed` is None where nothing is."""

    distribution: str
    specifier: str
    installed: str | None

    @property
    def requirement(self) -> str:
        """The requirement as pip takes it."""
        return f"{self.distribution}{self.specifier}"

    @property
    def is_package(self) -> bool:
        """Whether pip can meet it."""
        return self.distribution != _PYTHON

    def __str__(self) -> str:
        if not self.is_package:
            return f"needs {self.requirement}, this is Python {self.installed}"
        found = f"{self.installed} is" if self.installed else "it is not"
        return f"needs {self.requirement}, {found} installed"


def unmet_requirements(requires: Mapping[str, str]) -> list[UnmetRequirement]:
    """The entries of `requires` (distribution to version specifier) that the environment does not meet.

    The distribution `python` is the interpreter.

    Example:
        >>> [str(unmet) for unmet in unmet_requirements({"no-such-package": ">=2"})]
        ['needs no-such-package>=2, it is not installed']
    """
    unmet = []
    for distribution, specifier in sorted(requires.items()):
        try:
            installed = _version(distribution)
        except importlib.metadata.PackageNotFoundError:
            if distribution not in _OPTIONAL:
                unmet.append(UnmetRequirement(distribution, specifier, None))
            continue
        if not SpecifierSet(specifier).contains(installed, prereleases=True):
            unmet.append(UnmetRequirement(distribution, specifier, installed))
    return unmet


def _version(distribution: str) -> str:
    return platform.python_version() if distribution == _PYTHON else importlib.metadata.version(distribution)
