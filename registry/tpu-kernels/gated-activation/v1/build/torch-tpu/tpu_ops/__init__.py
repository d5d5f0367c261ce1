"""A JAX function as a torch op: one declaration gives the TPU path, the CPU path, the fake kernel, the gradient.

Self-contained (standard library, torch, jax, torch_tpu only), because this folder is copied into every built
kernel, where it is imported as ``from .tpu_ops import op``.
"""

from __future__ import annotations

from .errors import InputError, LoweringError
from .op import Cost, Op, op
from .target import Target, current_target, keep_jax_off_tpu

__all__ = ["Cost", "InputError", "LoweringError", "Op", "Target", "current_target", "keep_jax_off_tpu", "op"]
