"""Which packages are installed, and whether they are in the ranges that this package supports."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from ..packages import installed
from .finding import Finding, Level

_SECTION = "packages"
_DISTRIBUTION = "tpu-kernels"
_SHOWN = (
    "torch",
    "torch-tpu",
    "jax",
    "jaxlib",
    "libtpu",
    "huggingface-hub",
    "transformers",
    "diffusers",
    "kernels",
)
# Extras that users install; the others are for work on this package.
_EXTRAS = ("transformers", "diffusers")


def examine() -> Iterator[Finding]:
    """Python and each package, with the range that is supported."""
    try:
        metadata = importlib.metadata.metadata(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            _SECTION,
            "warning",
            _DISTRIBUTION,
            "runs from a folder and is not installed, so the ranges it supports are not known",
            "pip install -e . in its folder",
        )
        python, needed, optional = "", {}, {}
    else:
        python = metadata["Requires-Python"] or ""
        needed = requirements_of(_DISTRIBUTION)
        optional = {
            name: (extra, specifier)
            for extra in _EXTRAS
            for name, specifier in requirements_of(_DISTRIBUTION, extra).items()
        }
    yield _python(python)
    for name in _SHOWN:
        yield _package(name, needed, optional)


def requirements_of(distribution: str, extra: str = "") -> dict[str, SpecifierSet]:
    """What an installed distribution requires here, by name; with an extra, what only that adds."""
    found: dict[str, SpecifierSet] = {}
    for text in importlib.metadata.requires(distribution) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        base = marker is None or marker.evaluate({"extra": ""})
        applies = base if not extra else not base and marker is not None and marker.evaluate({"extra": extra})
        if applies:
            name = canonicalize_name(requirement.name)
            found[name] = found.get(name, SpecifierSet()) & requirement.specifier
    return found


def _python(specifier: str) -> Finding:
    version = platform.python_version()
    if specifier and not SpecifierSet(specifier).contains(version, prereleases=True):
        remedy = f"use a Python {specifier}"
        return Finding(_SECTION, "problem", "python", f"{version} is not supported ({specifier})", remedy)
    return Finding(_SECTION, "ok", "python", _with_range(version, specifier))


def _package(
    name: str, needed: dict[str, SpecifierSet], optional: dict[str, tuple[str, SpecifierSet]]
) -> Finding:
    version = installed(name)
    extra, wanted = optional.get(name, ("", SpecifierSet()))
    specifier = needed.get(name, wanted)
    if version is None and name in needed:
        remedy = f"pip install '{name}{specifier}'"
        # Without it kernels still run their reference path on the CPU.
        level: Level = "warning" if name == "torch-tpu" else "problem"
        return Finding(_SECTION, level, name, f"is not installed ({specifier} is needed)", remedy)
    if version is None:
        how = f"; pip install 'tpu-kernels[{extra}]' adds it" if extra else ""
        return Finding(_SECTION, "ok", name, f"is not installed, and not needed{how}")
    if not specifier.contains(version, prereleases=True):
        level = "problem" if name in needed else "warning"
        remedy = f"pip install '{name}{specifier}'"
        return Finding(_SECTION, level, name, f"{version} is not supported ({specifier})", remedy)
    return Finding(_SECTION, "ok", name, _with_range(version, str(specifier)))


def _with_range(version: str, specifier: str) -> str:
    return f"{version} ({specifier})" if specifier else version
