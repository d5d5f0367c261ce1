"""Gradients: JAX cannot differentiate a Pallas kernel, so it is told how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def with_gradient_of(reference: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, a function of arrays, with the gradient of `reference`, which computes the same."""

    @jax.custom_vjp
    def function(*arrays: Any) -> Any:
        return kernel(*arrays)

    def forward(*arrays: Any) -> tuple[Any, tuple[Any, ...]]:
        return kernel(*arrays), arrays

    def backward(arrays: tuple[Any, ...], grad: Any) -> tuple[Any, ...]:
        return jax.vjp(reference, *arrays)[1](grad)

    function.defvjp(forward, backward)
    return function
