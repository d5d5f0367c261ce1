"""The router of a mixture of experts: from logits to the experts of each token and their weights."""

from __future__ import annotations

from . import layers
from .ops import route

__all__ = ["layers", "route"]
