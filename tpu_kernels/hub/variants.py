"""Variants: the builds of one version, by the names of their folders, and which of them may run here.

The names, and which of them is preferred, are those of stock `kernels`, the best first::

    torch-stable-abi211-tpu-x86_64-linux    compiled against torch's stable ABI, for this torch or an older one
    torch213-tpu-x86_64-linux               compiled for this torch
    torch213-cxx11-tpu-x86_64-linux         the same, with the C++ ABI in the name
    torch-tpu                               Python only
    torch-universal                         Python only, for any hardware
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass

from packaging.version import Version

from .layout import VARIANT

UNIVERSAL = "torch-universal"
# The names of all builds for TPUs, as patterns for what to download.
TPU_PATTERNS = (VARIANT, UNIVERSAL, "torch*-tpu-*")

_PYTHON = re.compile(r"torch-([a-z0-9]+)")
_COMPILED = re.compile(r"torch(-stable-abi)?(\d)(\d+)(?:-(cxx11|cxx98))?-([a-z0-9]+)-([a-z0-9_]+)-([a-z]+)")
_OTHER_FRAMEWORK = re.compile(r"tvm-ffi\d+-[a-z0-9]+-[a-z0-9_]+-[a-z]+")


@dataclass(frozen=True)
class Verdict:
    """Whether the build `name` may run here; `refusal` says why not and is empty where it may."""

    name: str
    refusal: str = ""


def judge(names: Iterable[str]) -> list[Verdict]:
    """The builds that may run here, the best first, and then the others, each with the reason.

    Example:
        >>> [(verdict.name, verdict.refusal) for verdict in judge(["torch-cuda", "torch-tpu"])]
        [('torch-tpu', ''), ('torch-cuda', 'it is built for cuda')]
    """
    verdicts = [Verdict(name, _refusal(name)) for name in sorted(names)]
    return sorted(verdicts, key=lambda verdict: (bool(verdict.refusal), _preference(verdict.name)))


def is_for_tpu(name: str) -> bool:
    """Whether `name` is that of a build for TPUs, on this machine or another.

    Example:
        >>> [is_for_tpu(name) for name in ("torch-tpu", "torch213-tpu-aarch64-linux", "torch-cuda", "../x")]
        [True, True, False, False]
    """
    if name == UNIVERSAL:
        return True
    if python := _PYTHON.fullmatch(name):
        return python[1] == "tpu"
    compiled = _COMPILED.fullmatch(name)
    return compiled is not None and compiled[5] == "tpu"


def _refusal(name: str) -> str:
    if name in (VARIANT, UNIVERSAL):
        return ""
    if python := _PYTHON.fullmatch(name):
        return f"it is built for {python[1]}"
    compiled = _COMPILED.fullmatch(name)
    if compiled is None:
        known = _OTHER_FRAMEWORK.fullmatch(name)
        return "it is built for tvm-ffi, not for torch" if known else "no build has such a name"
    stable, major, minor, abi, backend, cpu, system = compiled.groups()
    if backend != "tpu":
        return f"it is built for {backend}"
    here = f"{platform.machine()}-{platform.system().lower()}"
    if f"{cpu}-{system}" != here:
        return f"it is compiled for {cpu}-{system}, and this machine is {here}"
    if abi == "cxx98":
        return "it is compiled for the C++ ABI that torch had before 2.7"
    torch = _torch()
    needed = (int(major), int(minor))
    if torch is None:
        return "it is compiled for torch, which is not installed; run: pip install torch"
    if stable and torch.release[:2] < needed:
        return f"it needs torch>={major}.{minor}, {torch} is installed; run: pip install 'torch>={major}.{minor}'"
    if not stable and torch.release[:2] != needed:
        return f"it needs torch=={major}.{minor}.*, {torch} is installed"
    return ""


def _preference(name: str) -> tuple[int, ...]:
    if compiled := _COMPILED.fullmatch(name):
        stable, major, minor, abi = compiled.groups()[:4]
        return (0, -int(major), -int(minor)) if stable else (1, 1 if abi else 0)
    return (3,) if name == UNIVERSAL else (2,)


def _torch() -> Version | None:
    try:
        return Version(importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return None
