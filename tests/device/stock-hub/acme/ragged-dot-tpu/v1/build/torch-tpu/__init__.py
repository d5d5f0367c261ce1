"""A grouped matrix product and experts for TPUs, forward only."""

from . import layers
from .experts import experts_forward
from .ragged_dot import ragged_dot

__all__ = ["experts_forward", "layers", "ragged_dot"]
