"""An op in torch's dispatcher: its schema, and what runs for it on each device."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from .cpu import reference_program
from .specialise import Arguments, Program, Specialised, check_one_device, meta_arguments
from .tpu import kernel_program

# torch's dispatcher knows device `tpu` by this key; the name "tpu" exists only once torch_tpu is loaded.
TPU_KEY = "PrivateUse1"


@dataclasses.dataclass(frozen=True)
class Definition:
    """What torch is told of an op.

    Attributes:
      name: without its namespace.
      signature: annotated; tensors positional, static arguments by keyword.
      declaration: from the arguments, as meta or fake tensors, to tensors like the results; checks them.
      kernel: JAX function of the arguments, ``tpu`` and ``interpret``.
      reference: JAX function of the arguments.
      check_values: is given the arguments on the CPU, at every call; may be None.
      gradient: JAX function of the arguments, ``results`` and ``grads``, ``tpu`` and ``interpret``; may be None.
    """

    name: str
    signature: inspect.Signature
    declaration: Callable[..., Any]
    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    check_values: Callable[..., None] | None = None
    gradient: Callable[..., Any] | None = None


def schema_signature(signature: inspect.Signature) -> inspect.Signature:
    """`signature` as torch's schemas have it.

    Tensors come first and may be given by position, the rest by keyword: torch gives gradients to positional
    arguments only.
    """
    tensors = [p for p in signature.parameters.values() if "Tensor" in str(p.annotation)]
    static = [p for p in signature.parameters.values() if "Tensor" not in str(p.annotation)]
    return signature.replace(
        parameters=[p.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in tensors]
        + [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in static]
    )


def tensor_parameters(signature: inspect.Signature) -> list[inspect.Parameter]:
    """The parameters of a schema signature that are tensors."""
    return [p for p in signature.parameters.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


def define(definition: Definition, module: str) -> torch.library.Library:
    """Defines an op in a namespace named after `module`'s top-level package, and returns the library that holds it.

    A module that is executed twice, say by two loaders, gets a namespace a time.
    """
    namespace = re.sub(r"\W", "_", module.split(".")[0])
    for attempt in itertools.count():
        library = torch.library.Library(f"{namespace}_{attempt}" if attempt else namespace, "FRAGMENT")
        try:
            define_in(library, definition)
        except RuntimeError as error:
            if "multiple times" not in str(error) and "already" not in str(error):
                raise
        else:
            return library
    raise AssertionError("unreachable: the attempts do not end")


def define_in(library: torch.library.Library, definition: Definition) -> None:
    """Defines an op in the namespace of `library`."""

    def function() -> None: ...

    function.__signature__ = definition.signature  # type: ignore[attr-defined]
    schema = torch.library.infer_schema(function, mutates_args=())
    library.define(definition.name + schema, tags=(torch.Tag.pt2_compliant_tag,))


def implement(library: torch.library.Library, definition: Definition, paths: Counter[str]) -> Any:
    """Gives a defined op its implementations: on a TPU, on the CPU, for fake tensors. Returns its overload.

    Args:
      paths: counts the programs that are made, by the path they take.
    """
    qualified = f"{library.ns}::{definition.name}"

    def declared(arguments: Arguments) -> Any:
        check_one_device(arguments)
        return definition.declaration(**meta_arguments(arguments))

    def make_tpu(arguments: Arguments) -> Program:
        outputs = declared(arguments)
        single = isinstance(outputs, torch.Tensor)
        program, path = kernel_program(
            qualified,
            definition.kernel,
            definition.reference,
            arguments,
            [outputs] if single else list(outputs),
            single=single,
        )
        paths[path] += 1
        return program

    def make_cpu(arguments: Arguments) -> Program:
        declared(arguments)
        paths["cpu"] += 1
        return reference_program(definition.reference, arguments)

    on_cpu = Specialised(definition.signature, make_cpu)

    def cpu(*args: Any, **kwargs: Any) -> Any:
        if definition.check_values is not None:
            definition.check_values(*args, **kwargs)
        return on_cpu(*args, **kwargs)

    def fake(*args: Any, **kwargs: Any) -> Any:
        # By name: a tensor that the declaration takes by keyword only comes by position.
        return definition.declaration(**definition.signature.bind(*args, **kwargs).arguments)

    library.impl(definition.name, Specialised(definition.signature, make_tpu), TPU_KEY)
    library.impl(definition.name, cpu, "CPU")
    torch.library.register_fake(qualified, fake, lib=library)
    return getattr(getattr(torch.ops, library.ns), definition.name).default
