"""Tensors as JAX sees them: dtypes of both sides, and the 32-bit integers that TPU programs use."""

from __future__ import annotations

from typing import Any

import torch

from .errors import InputError

# torch_tpu traces with 32-bit types, and so does JAX unless told otherwise.
NARROWED = {torch.int64: torch.int32, torch.uint64: torch.uint32, torch.float64: torch.float32}

_NAMES = [
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
]
_JAX_NAME = {getattr(torch, name): name for name in _NAMES}


def to_jax_dtype(dtype: torch.dtype) -> Any:
    """The numpy dtype that JAX uses for `dtype`.

    Raises:
      InputError: JAX has no such dtype.
    """
    import jax.numpy as jnp

    if dtype not in _JAX_NAME:
        raise InputError(f"dtype {dtype} has no counterpart in JAX; supported: {', '.join(_NAMES)}")
    return jnp.dtype(_JAX_NAME[dtype])


def narrowed(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with 64-bit integers as 32-bit ones."""
    return tensor.to(NARROWED[tensor.dtype]) if tensor.dtype in NARROWED else tensor
