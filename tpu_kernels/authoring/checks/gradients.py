"""A kernel's gradients, interpreted on the CPU, beside JAX's own of its reference in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ...analysis.target import parse_target
from ..comparison import compare, tolerance_of
from ..examples import Example
from .report import Finding
from .subject import NotRun, Subject, guarded


def check_gradients(subject: Subject) -> Iterator[Finding]:
    """Gradients: those of each differentiable op, one tensor after the other, against the reference's."""
    findings: list[Finding] = []
    examples = [example for example in subject.some(subject.examples) if example.op.differentiable]
    if not examples:
        raise NotRun("no example is of a differentiable op")
    for example in examples:
        with guarded(subject, example, findings):
            wrong = _wrong(example, subject.generation)
            for name, message in wrong.items():
                text = f"{example.name}: wrong gradient in {name}: {message}"
                findings.append(subject.error(text, example.op.jax_fn))
    yield from findings


def _wrong(example: Example, generation: str) -> dict[str, str]:
    """What is wrong with which gradient."""
    import jax
    import numpy as np

    names = example.differentiable()

    def gradients(function: Callable[..., Any], arrays: dict[str, Any]) -> list[Any]:
        def forward(*given: Any) -> Any:
            return function({**arrays, **dict(zip(names, given, strict=True))})

        @jax.jit
        def pulled(*given: Any) -> Any:
            result, pullback = jax.vjp(forward, *given)
            # Different weights for the results, so that errors do not cancel.
            return pullback(jax.tree.map(_weights, result))

        return [np.asarray(grad).astype(np.float64) for grad in pulled(*[arrays[name] for name in names])]

    with parse_target(generation).mesh():
        found = gradients(example.kernel(generation, True), example.arrays)
    wanted = example.widely(lambda arrays: gradients(example.reference(), arrays))
    wrong = {}
    for name, actual, expected in zip(names, found, wanted, strict=True):
        difference = compare([actual], [expected], gradient_tolerance(example, name))
        if difference.wrong:
            wrong[name] = difference.wrong
    return wrong


def gradient_tolerance(example: Example, name: str) -> float:
    """The relative L2 error that a tensor's gradient may have: it is as exact as the results and the tensor are."""
    return 2 * max(tolerance_of(example.dtype()), tolerance_of(example.shapes()[name][1]))


def _weights(result: Any) -> Any:
    import jax
    import jax.numpy as jnp
    import numpy as np

    if not jnp.issubdtype(result.dtype, jnp.inexact):
        return np.zeros(result.shape, jax.dtypes.float0)  # an integer has no gradient
    return (1 + jnp.arange(result.size) % 5).reshape(result.shape).astype(result.dtype)
