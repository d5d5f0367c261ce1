"""Rotary position embedding of queries and keys, whole and partial."""

from __future__ import annotations

from . import layers
from .ops import rotary

__all__ = ["layers", "rotary"]
