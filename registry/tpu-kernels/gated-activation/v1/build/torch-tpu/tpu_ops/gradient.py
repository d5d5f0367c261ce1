"""The gradient of an op: an op of its own, ``<name>_backward``, over JAX's gradient of the kernel."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._library.autograd import Info, make_autograd_impl

from .errors import InputError
from .registration import Definition, define_in, implement, tensor_parameters


def add_gradient(
    library: torch.library.Library,
    definition: Definition,
    overload: Any,
    differentiable: Sequence[str],
    paths: Counter[str],
) -> None:
    """Makes the op of `definition` differentiable in the tensors named by `differentiable`.

    Its tensors are saved. Without a gradient of its own the kernel's residuals are computed again in the backward
    pass; with one (`Definition.gradient`) the results are saved too, and it makes do with them.
    """
    tensors = tensor_parameters(definition.signature)
    places = {p.name: place for place, p in enumerate(tensors)}
    unknown = sorted(set(differentiable) - set(places))
    if unknown:
        raise InputError(f"{definition.name}: differentiable names no tensor of the op: {', '.join(unknown)}")
    backward_definition = _backward_definition(definition, differentiable)
    define_in(library, backward_definition)
    backward_overload = implement(library, backward_definition, paths)

    # By keyword, as torch calls it; and without the last where the op has no static arguments.
    def save(
        ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: dict[str, Any] | None = None
    ) -> None:
        # torch leaves out optional tensors at the end that were not given.
        kept = [*inputs, *[None] * (len(tensors) - len(inputs))]
        if definition.gradient is not None:
            kept += [output] if isinstance(output, torch.Tensor) else output
        ctx.save_for_backward(*kept)
        ctx.static = keyword_only_inputs or {}

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad
        needed = [places[name] < len(wanted) and wanted[places[name]] for name in differentiable]
        saved = ctx.saved_tensors
        results = [list(saved[len(tensors) :])] if definition.gradient is not None else []
        given = [*saved[: len(tensors)], *results, list(grads)]
        found = iter(backward_overload(*given, needed=needed, **ctx.static))
        result: list[Any] = [None] * len(wanted)
        for name, need in zip(differentiable, needed, strict=True):
            if need:
                result[places[name]] = next(found)
        return tuple(result)

    def no_second_derivative(ctx: Any, *grads: Any) -> None:
        raise InputError(
            f"{library.ns}::{definition.name} has no second derivative; do not ask for one with create_graph=True"
        )

    library.impl(definition.name, _recorded(overload, backward, save), "Autograd", with_keyset=True)
    qualified = f"{library.ns}::{backward_definition.name}"
    torch.library.register_autograd(qualified, no_second_derivative, lib=library)


def _backward_definition(definition: Definition, differentiable: Sequence[str]) -> Definition:
    """The op's own arguments, its results if the gradient takes them, their gradients, and which are needed."""
    positional, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = list(definition.signature.parameters.values())
    own = definition.gradient is not None
    signature = inspect.Signature(
        [
            *[p.replace(default=inspect.Parameter.empty) for p in parameters if p.kind is positional],
            *([inspect.Parameter("results", positional, annotation=list[torch.Tensor])] * own),
            inspect.Parameter("grads", positional, annotation=list[torch.Tensor]),
            *[p for p in parameters if p.kind is keyword],
            inspect.Parameter("needed", keyword, annotation=list[bool]),
        ],
        return_annotation=list[torch.Tensor],
    )

    def chosen(needed: Sequence[bool]) -> list[str]:
        return [name for name, need in zip(differentiable, needed, strict=True) if need]

    def declaration(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        given = signature.bind(*args, **kwargs).arguments
        return [
            torch.empty_like(given[name], memory_format=torch.contiguous_format)
            for name in chosen(given["needed"])
        ]

    def gradient_of(function: Callable[..., Any]) -> Callable[..., Any]:
        def gradient(
            *, grads: list[Any], needed: list[bool], results: list[Any] | None = None, **arguments: Any
        ) -> list[Any]:
            import jax

            names = chosen(needed)

            def forward(*values: Any) -> Any:
                return function(**{**arguments, **dict(zip(names, values, strict=True))})

            result, pullback = jax.vjp(forward, *[arguments[name] for name in names])
            leaves, structure = jax.tree.flatten(result)
            cotangents = [cotangent(grad, leaf) for grad, leaf in zip(grads, leaves, strict=True)]
            return list(pullback(jax.tree.unflatten(structure, cotangents)))

        return gradient

    def cotangent(grad: Any, result: Any) -> Any:
        import jax
        import jax.numpy as jnp
        import numpy as np

        if jnp.issubdtype(result.dtype, jnp.inexact):
            return grad.astype(result.dtype)
        return np.zeros(result.shape, jax.dtypes.float0)  # what JAX takes for a result that has no gradient

    def own_gradient(*, needed: list[bool], **arguments: Any) -> list[Any]:
        assert definition.gradient is not None
        found = definition.gradient(**arguments)
        return [grad for grad, need in zip(found, needed, strict=True) if need]

    return Definition(
        name=f"{definition.name}_backward",
        signature=signature,
        declaration=declaration,
        kernel=own_gradient if own else gradient_of(definition.kernel),
        reference=gradient_of(definition.reference),
    )


def _recorded(overload: Any, backward: Callable[..., Any], save: Callable[..., Any]) -> Callable[..., Any]:
    """What ``torch.library.register_autograd`` registers, with a short way round it for calls without gradient.

    These are the calls of a decode step, and torch's own way costs them as much as the kernel's dispatch.
    """
    recorded = make_autograd_impl(overload, Info(backward, save))
    redispatch, below = overload._handle.redispatch_boxed, torch._C._after_autograd_keyset
    wanted, any_requires_grad = torch._C.is_grad_enabled, torch._C._any_requires_grad

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if wanted() and any_requires_grad(*args):
            return recorded(keyset, *args, **kwargs)
        return redispatch(keyset & below, *args, **kwargs)

    return call
