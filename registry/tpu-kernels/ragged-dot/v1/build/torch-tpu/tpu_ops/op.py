"""`op`: declares a torch op over a JAX function."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._library.autograd import Info, make_autograd_impl

from .cpu import reference_program
from .errors import InputError
from .specialise import Arguments, Program, Specialised, check_one_device, meta_arguments
from .tpu import kernel_program

# torch's dispatcher knows device `tpu` by this key; the name "tpu" exists only once torch_tpu is loaded.
TPU_KEY = "PrivateUse1"


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
        self.cases = tuple(cases)
        self.paths: Counter[str] = Counter()
        self._declaration = declaration
        self._check_values = check_values
        self._differentiable = tuple(differentiable)
        self._schema_signature = _tensors_first(self.__signature__)
        self._library, self.name = _define(self)
        namespace, name = self.name.split("::")
        self._overload = getattr(getattr(torch.ops, namespace), name).default
        if self._differentiable:
            _register_gradient(self, self._library, namespace, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._overload(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<op {self.name}>"


def op(
    *,
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    differentiable: Sequence[str] = (),
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
            check_values=check_values,
            cost=cost,
            cases=cases,
        )

    return declare


def _tensors_first(signature: inspect.Signature) -> inspect.Signature:
    """Tensors positional, the rest by keyword: torch gives gradients to positional arguments only."""
    tensors = [p for p in signature.parameters.values() if _is_tensor(p)]
    static = [p for p in signature.parameters.values() if not _is_tensor(p)]
    return signature.replace(
        parameters=[p.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in tensors]
        + [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in static]
    )


def _is_tensor(parameter: inspect.Parameter) -> bool:
    return "Tensor" in str(parameter.annotation)


def _schema(signature: inspect.Signature) -> str:
    def function() -> None: ...

    function.__signature__ = signature  # type: ignore[attr-defined]
    return torch.library.infer_schema(function, mutates_args=())


def _define(op: Op) -> tuple[torch.library.Library, str]:
    """Defines the op in torch, under the id of the kernel's module."""
    namespace = re.sub(r"\W", "_", op.__module__.split(".")[0])
    schema = _schema(op._schema_signature)
    for attempt in itertools.count():
        # A module that is executed twice, say by two loaders, gets a namespace a time.
        library = torch.library.Library(f"{namespace}_{attempt}" if attempt else namespace, "FRAGMENT")
        try:
            library.define(op.__name__ + schema, tags=(torch.Tag.pt2_compliant_tag,))
            break
        except RuntimeError as error:
            if "multiple times" not in str(error) and "already" not in str(error):
                raise
    qualified = f"{library.ns}::{op.__name__}"
    single = not isinstance(_returned(op.__signature__), tuple)

    def make_tpu(arguments: Arguments) -> Program:
        outputs = _declared(op, arguments)
        program, path = kernel_program(qualified, op.jax_fn, op.reference, arguments, outputs, single=single)
        op.paths[path] += 1
        return program

    def make_cpu(arguments: Arguments) -> Program:
        _declared(op, arguments)
        op.paths["cpu"] += 1
        return reference_program(op.reference, arguments)

    on_cpu = Specialised(op._schema_signature, make_cpu)

    def cpu(*args: Any, **kwargs: Any) -> Any:
        if op._check_values is not None:
            op._check_values(*args, **kwargs)
        return on_cpu(*args, **kwargs)

    library.impl(op.__name__, Specialised(op._schema_signature, make_tpu), TPU_KEY)
    library.impl(op.__name__, cpu, "CPU")
    torch.library.register_fake(qualified, op._declaration, lib=library)
    return library, qualified


def _returned(signature: inspect.Signature) -> Any:
    annotation = signature.return_annotation
    return getattr(annotation, "__args__", annotation)


def _declared(op: Op, arguments: Arguments) -> list[torch.Tensor]:
    """Checks `arguments`; returns meta tensors like the results."""
    check_one_device(arguments)
    outputs = op._declaration(**meta_arguments(arguments))
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def _register_gradient(op: Op, library: torch.library.Library, namespace: str, name: str) -> None:
    """Defines ``<name>_backward`` over JAX's own gradient of the kernel, and ties the two together."""
    parameters = list(op._schema_signature.parameters.values())
    tensors = [p for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    unknown = set(op._differentiable) - {p.name for p in tensors}
    if unknown:
        raise InputError(f"{op.name}: differentiable names no tensor of the op: {', '.join(sorted(unknown))}")
    required = inspect.Parameter.empty
    backward_parameters = [p.replace(default=required) for p in tensors]
    backward_parameters.append(
        inspect.Parameter("grads", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=list[torch.Tensor])
    )
    backward_parameters += [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    backward_parameters.append(
        inspect.Parameter("needed", inspect.Parameter.KEYWORD_ONLY, annotation=list[bool])
    )
    signature = inspect.Signature(backward_parameters, return_annotation=list[torch.Tensor])
    backward_name = f"{name}_backward"
    library.define(backward_name + _schema(signature), tags=(torch.Tag.pt2_compliant_tag,))
    qualified = f"{namespace}::{backward_name}"

    def chosen(needed: Sequence[bool]) -> list[str]:
        return [n for n, need in zip(op._differentiable, needed, strict=True) if need]

    def declaration(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        bound = signature.bind(*args, **kwargs).arguments
        return [
            torch.empty_like(bound[n], memory_format=torch.contiguous_format) for n in chosen(bound["needed"])
        ]

    def gradient_of(function: Callable[..., Any]) -> Callable[..., Any]:
        def gradient(*, grads: list[Any], needed: list[bool], **arguments: Any) -> list[Any]:
            import jax

            names = chosen(needed)
            forward = lambda *values: function(**{**arguments, **dict(zip(names, values, strict=True))})  # noqa: E731
            result, pullback = jax.vjp(forward, *[arguments[n] for n in names])
            grads = [g.astype(r.dtype) for g, r in zip(grads, jax.tree.leaves(result), strict=True)]
            return list(pullback(jax.tree.unflatten(jax.tree.structure(result), grads)))

        return gradient

    kernel, reference = gradient_of(op.jax_fn), gradient_of(op.reference)

    def make_tpu(arguments: Arguments) -> Program:
        outputs = declaration(**meta_arguments(arguments))
        program, path = kernel_program(qualified, kernel, reference, arguments, outputs, single=False)
        op.paths[path] += 1
        return program

    def make_cpu(arguments: Arguments) -> Program:
        op.paths["cpu"] += 1
        return reference_program(reference, arguments)

    library.impl(backward_name, Specialised(signature, make_tpu), TPU_KEY)
    library.impl(backward_name, Specialised(signature, make_cpu), "CPU")
    torch.library.register_fake(qualified, declaration, lib=library)
    backward_overload = getattr(getattr(torch.ops, namespace), backward_name).default
    places = [next(i for i, p in enumerate(tensors) if p.name == n) for n in op._differentiable]

    def save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.static = keyword_only_inputs

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        needed = [ctx.needs_input_grad[place] for place in places]
        found = iter(backward_overload(*ctx.saved_tensors, list(grads), needed=needed, **ctx.static))
        result: list[Any] = [None] * len(tensors)
        for place, need in zip(places, needed, strict=True):
            if need:
                result[place] = next(found)
        return tuple(result)

    def no_second_derivative(ctx: Any, *grads: Any) -> None:
        raise InputError(f"{op.name} has no second derivative; do not ask for one with create_graph=True")

    overload = getattr(getattr(torch.ops, namespace), name).default
    library.impl(name, _with_gradient(overload, backward, save), "Autograd", with_keyset=True)
    torch.library.register_autograd(qualified, no_second_derivative, lib=library)


def _with_gradient(
    overload: Any, backward: Callable[..., Any], save: Callable[..., Any]
) -> Callable[..., Any]:
    """What ``torch.library.register_autograd`` registers, with a short way round it for calls without gradient.

    These are the calls of a decode step, and torch's own way costs them as much as the kernel's dispatch.
    """
    recorded = make_autograd_impl(overload, Info(backward, save))
    redispatch, below = overload.redispatch, torch._C._after_autograd_keyset
    wanted, any_requires_grad = torch._C.is_grad_enabled, torch._C._any_requires_grad

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if wanted() and any_requires_grad(*args):
            return recorded(keyset, *args, **kwargs)
        return redispatch(keyset & below, *args, **kwargs)

    return call
