"""The CPU path: the reference, compiled by JAX, on the tensors' own memory through dlpack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .dtypes import narrowed
from .specialise import Arguments, Program, as_function_of_arrays
from .target import keep_jax_off_tpu


def reference_program(function: Callable[..., Any], arguments: Arguments) -> Program:
    """A program for CPU tensors that runs `function`, a reference in plain jax.numpy."""
    keep_jax_off_tpu()
    import jax

    compiled = jax.jit(as_function_of_arrays(function, arguments))
    cpu = jax.devices("cpu")[0]

    def run(tensors: list[torch.Tensor]) -> Any:
        with jax.default_device(cpu):
            results = compiled(*[_to_jax(tensor) for tensor in tensors])
        return [_to_torch(r) for r in results] if isinstance(results, (list, tuple)) else _to_torch(results)

    return run


def _to_jax(tensor: torch.Tensor) -> Any:
    import jax

    return jax.dlpack.from_dlpack(narrowed(tensor.detach()).contiguous())


def _to_torch(array: Any) -> torch.Tensor:
    # JAX owns its results' memory and takes it for immutable; torch may write to what it is given.
    return torch.utils.dlpack.from_dlpack(array).clone()
