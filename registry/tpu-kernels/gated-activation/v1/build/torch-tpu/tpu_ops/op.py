"""`op`: declares a torch op over a JAX function."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch.compiler import is_dynamo_compiling

from .gradient import add_gradient
from .registration import Definition, define, implement, schema_signature


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one call has to do at least.

    Attributes:
      flops: floating-point operations.
      bytes: bytes read from and written to device memory.
    """

    flops: int
    bytes: int


class Op:
    """A torch op whose device code is a JAX function. Made by `op`; called like the function it declares.

    Attributes:
      name: qualified name, ``namespace::name``; the namespace is the kernel module's own id, so that two
        versions of a kernel never change each other.
      jax_fn: the pure JAX function, with its keywords (``interpret``, ``tpu``, ``config``).
      reference: the same in plain jax.numpy.
      cost: from the op's arguments to a `Cost`, or None.
      differentiable: names of the tensors that have gradients.
      cases: the kernel's named cases of this op.
      paths: how many programs were made for each path: "kernel" (a TPU), "interpreted" and "reference" (the
        emulated device), "cpu".
    """

    def __init__(
        self,
        declaration: Callable[..., Any],
        *,
        kernel: Callable[..., Any],
        reference: Callable[..., Any],
        differentiable: Sequence[str],
        gradient: Callable[..., Any] | None,
        check_values: Callable[..., None] | None,
        cost: Callable[..., Cost] | None,
        cases: Sequence[Any],
    ) -> None:
        self.__doc__ = declaration.__doc__
        self.__name__ = declaration.__name__
        self.__module__ = declaration.__module__
        self.__signature__ = inspect.signature(declaration, eval_str=True)
        self.jax_fn = kernel
        self.reference = reference
        self.cost = cost
        self.differentiable = tuple(differentiable)
        self.cases = tuple(cases)
        self.paths: Counter[str] = Counter()
        definition = Definition(
            name=declaration.__name__,
            signature=schema_signature(self.__signature__),
            declaration=declaration,
            kernel=kernel,
            reference=reference,
            check_values=check_values,
            gradient=gradient,
        )
        # torch forgets what a library holds when the library goes.
        self._library = define(definition, declaration.__module__)
        self._overload = implement(self._library, definition, self.paths)
        # What calling the overload comes to, less one Python call; torch.compile traces the overload itself.
        self._dispatch = self._overload._op
        self.name = f"{self._library.ns}::{definition.name}"
        if differentiable:
            add_gradient(self._library, definition, self._overload, differentiable, self.paths)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return self._overload(*args, **kwargs)
        return self._dispatch(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<op {self.name}>"


def op(
    *,
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    differentiable: Sequence[str] = (),
    gradient: Callable[..., Any] | None = None,
    check_values: Callable[..., None] | None = None,
    cost: Callable[..., Cost] | None = None,
    cases: Sequence[Any] = (),
) -> Callable[[Callable[..., Any]], Op]:
    """Makes the decorated declaration a torch op over `kernel`.

    The declaration has the op's name, signature (annotated with torch.Tensor, bool, int, float, str,
    torch.dtype, lists of them and optional ones) and docstring. Its body checks shapes and dtypes, raising
    `InputError`, and returns what the result looks like: ``x.new_empty(...)``, or a tuple of these. It sees
    tensors with shapes but no values, before anything is compiled, and serves as the op's fake kernel.

    Args:
      kernel: JAX function of the same arguments, and ``interpret: bool`` and ``tpu: str`` (the generation).
      reference: JAX function of the same arguments in plain jax.numpy, for the CPU.
      differentiable: names of the tensors that have gradients. `kernel` and `reference` must then be
        differentiable by JAX; the gradient is an op of its own, ``<name>_backward``.
      gradient: JAX function of the same arguments, of ``results``, the list of what `kernel` returned, and of
        ``grads``, theirs: the gradients of all `differentiable` tensors, in order. Unless given, JAX's gradient of
        `kernel`, which computes the kernel's residuals again.
      check_values: is given the arguments where their values are at hand without waiting, on the CPU.
      cost: from the op's arguments to its `Cost`.
      cases: the kernel's named cases, for tests, benchmarks and tuning.

    Example:
      >>> @op(kernel=lambda x, tpu, interpret: 2 * x, reference=lambda x: 2 * x, differentiable=["x"])
      ... def double(x: torch.Tensor) -> torch.Tensor:
      ...     "Twice x."
      ...     return torch.empty_like(x)
      >>> double(torch.ones(2))
      tensor([2., 2.])
    """

    def declare(declaration: Callable[..., Any]) -> Op:
        return Op(
            declaration,
            kernel=kernel,
            reference=reference,
            differentiable=differentiable,
            gradient=gradient,
            check_values=check_values,
            cost=cost,
            cases=cases,
        )

    return declare
