"""Authoring: building kernels, and the registry that ships with this package."""

from __future__ import annotations

from .builder import BuiltKernel, build
from .registry import build_registry, stale

__all__ = ["BuiltKernel", "build", "build_registry", "stale"]
