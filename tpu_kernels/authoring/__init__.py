"""Authoring: starting, checking, building and publishing kernels, and the registry that ships with this package."""

from __future__ import annotations

from .builder import BuiltKernel, build
from .checks import CHECKS, Report, check
from .golden import write_golden
from .publish import Publication, publish, yank
from .registry import build_registry, stale
from .scaffold import init, templates

__all__ = [
    "CHECKS",
    "BuiltKernel",
    "Publication",
    "Report",
    "build",
    "build_registry",
    "check",
    "init",
    "publish",
    "stale",
    "templates",
    "write_golden",
    "yank",
]
