"""One call's arguments: what of it specialises a program, and how its JAX function is given it.

An op is called with tensors, lists of tensors and static values. A program serves all calls that agree in the
shapes, dtypes and devices of the tensors and in the static values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .dtypes import NARROWED, to_jax_dtype
from .errors import InputError

Arguments = Mapping[str, Any]
# Runs one program on the tensors of a call, in the order in which they were given.
Program = Callable[[list[Tensor]], Any]


class Specialised:
    """Calls the program made for the arguments' shapes, dtypes, devices and static values.

    This is the hot path of every eager call: one key, one look-up.
    """

    def __init__(self, signature: inspect.Signature, make: Callable[[Arguments], Program]) -> None:
        self._signature = signature
        self._make = make
        self._programs: dict[tuple[Any, ...], Program] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key: list[Any] = []
        tensors: list[Tensor] = []
        # Written out for what most arguments are; a call of a function for each would take a third more time.
        for value in args:
            if isinstance(value, Tensor):
                tensors.append(value)
                key += (value.shape, value.dtype, value.device)
            else:
                _collect(value, key, tensors)
        for name, value in kwargs.items():
            key.append(name)
            if isinstance(value, (list, tuple)):
                _collect(value, key, tensors)
            else:
                key.append(value)
        call = tuple(key)
        program = self._programs.get(call)
        if program is None:
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            program = self._programs[call] = self._make(bound.arguments)
        return program(tensors)


def _collect(value: Any, key: list[Any], tensors: list[Tensor]) -> None:
    """Adds to `key` what specialises a program, and to `tensors` those in `value`.

    Static values stand there as they are: torch's schema has made each of its parameter's type.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        key += (value.shape, value.dtype, value.device)
    elif isinstance(value, (list, tuple)):
        key.append(len(value))
        for item in value:
            _collect(item, key, tensors)
    else:
        key.append(value)


def tensors_of(arguments: Arguments) -> list[Tensor]:
    """The tensors among `arguments`, in order; those in lists too."""
    found: list[Tensor] = []
    for value in arguments.values():
        _collect(value, [], found)
    return found


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """`value` with each tensor in it replaced by ``change(tensor)``."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [map_tensors(item, change) for item in value]
    return value


def meta_arguments(arguments: Arguments) -> dict[str, Any]:
    """`arguments` with tensors that have shapes only."""

    def to_meta(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    return {name: map_tensors(value, to_meta) for name, value in arguments.items()}


def check_one_device(arguments: Arguments) -> None:
    """Refuses tensors on different devices.

    Raises:
      InputError: naming each tensor and its device.
    """
    devices = {tensor.device for tensor in tensors_of(arguments)}
    if len(devices) > 1:
        where = ", ".join(
            f"{name} on {value.device}" for name, value in arguments.items() if isinstance(value, Tensor)
        )
        raise InputError(f"all tensors must be on one device, got {where}; move them with .to(device)")


def shapes_for_jax(arguments: Arguments) -> list[Any]:
    """What JAX traces with: shape and (32-bit) dtype of each tensor, in order."""
    import jax

    return [
        jax.ShapeDtypeStruct(tuple(tensor.shape), to_jax_dtype(NARROWED.get(tensor.dtype, tensor.dtype)))
        for tensor in tensors_of(arguments)
    ]


def as_function_of_arrays(function: Callable[..., Any], arguments: Arguments) -> Callable[..., Any]:
    """`function` with its static arguments bound, as a function of the arrays in order."""
    # Only the places of the tensors are kept, so that a cached program holds on to no tensor.
    template = meta_arguments(arguments)

    def call(*arrays: Any) -> Any:
        remaining = iter(arrays)
        given = {name: map_tensors(value, lambda _: next(remaining)) for name, value in template.items()}
        static = {
            name: to_jax_dtype(value) if isinstance(value, torch.dtype) else value
            for name, value in given.items()
        }
        return function(**static)

    return call
