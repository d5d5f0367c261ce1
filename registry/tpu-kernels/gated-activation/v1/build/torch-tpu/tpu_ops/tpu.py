"""The TPU path: the kernel's JAX function, exported once per specialisation, called straight through torch_tpu.

torch_tpu's public ``torch.tpu.pallas.jax_op`` does the same with a signature walk at every call. What lies below
it, registering a StableHLO module and calling it by its fingerprint, is used here where the installed version
has it; where not, the public function is.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import logging
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .dtypes import NARROWED, narrowed
from .errors import InputError, LoweringError
from .specialise import (
    Arguments,
    Program,
    as_function_of_arrays,
    shapes_for_jax,
    tensors_of,
)
from .target import Target, current_target, keep_jax_off_tpu

_logger = logging.getLogger("tpu_kernels.ops")
_public_name = itertools.count()


def kernel_program(
    name: str,
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    arguments: Arguments,
    outputs: Sequence[torch.Tensor],
    *,
    single: bool,
) -> tuple[Program, str]:
    """A program for tensors on device `tpu`.

    Args:
      name: the op's qualified name.
      kernel: JAX function that takes ``interpret`` and ``tpu`` beside the op's own arguments.
      reference: plain JAX function of the op's arguments.
      arguments: of the call that the program is made for.
      outputs: meta tensors, what the results look like.
      single: the op returns a tensor, not a list.

    Returns:
      The program, and which path it takes: "kernel", or on the emulated device "interpreted" or "reference".
    """
    keep_jax_off_tpu()
    target = current_target()
    if not target.emulated:
        exported = _export(_with_target(kernel, target, interpret=False), arguments, target)
        path = "kernel"
    else:
        try:
            exported = _export(_with_target(kernel, target, interpret=True), arguments, target)
            path = "interpreted"
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001  whatever the interpreter cannot do, the reference can
            _logger.warning("%s cannot be interpreted here, its reference runs instead: %s", name, error)
            exported = _export(reference, arguments, target)
            path = "reference"
    _check_outputs(name, exported, outputs)
    return _program(name, exported, arguments, outputs, single=single), path


def _with_target(kernel: Callable[..., Any], target: Target, *, interpret: bool) -> Callable[..., Any]:
    return lambda **arguments: kernel(**arguments, tpu=target.generation, interpret=interpret)


def _export(function: Callable[..., Any], arguments: Arguments, target: Target) -> Any:
    import jax
    import jax.export

    # Unused arguments are kept, as torch_tpu passes them all. Custom calls are what kernels are made of.
    jitted = jax.jit(as_function_of_arrays(function, arguments), keep_unused=True)
    checks = [jax.export.DisabledSafetyCheck.custom_call("ALL")]
    with target.mesh():
        return jax.export.export(jitted, platforms=["tpu"], disabled_checks=checks)(
            *shapes_for_jax(arguments)
        )


def _check_outputs(name: str, exported: Any, outputs: Sequence[torch.Tensor]) -> None:
    promised = [(tuple(t.shape), str(NARROWED.get(t.dtype, t.dtype)).removeprefix("torch.")) for t in outputs]
    computed = [(tuple(aval.shape), str(aval.dtype)) for aval in exported.out_avals]
    if promised != computed:
        raise LoweringError(
            f"{name} promises {promised} but its JAX function returns {computed}: a bug in the op"
        )


def _program(
    name: str, exported: Any, arguments: Arguments, outputs: Sequence[torch.Tensor], *, single: bool
) -> Program:
    run = _direct_program(name, exported, outputs, single=single)
    if run is None:
        run = _public_program(name, exported, arguments, single=single)
    if any(tensor.dtype in NARROWED for tensor in tensors_of(arguments)):
        return lambda tensors: run([narrowed(tensor) for tensor in tensors])
    return run


def _direct_calls() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """torch_tpu's own way to call and to register a module, None where this version has none."""
    try:
        from torch_tpu._internal.pallas.tpu_torch_pallas import call_custom_kernel, register_custom_kernel
    except ImportError:
        return None
    return call_custom_kernel, register_custom_kernel


def _direct_program(
    name: str, exported: Any, outputs: Sequence[torch.Tensor], *, single: bool
) -> Program | None:
    direct = _direct_calls()
    if direct is None:
        return None
    call_custom_kernel, register_custom_kernel = direct
    fingerprint = _fingerprint(exported)
    register_custom_kernel(name, fingerprint, serialized_mlir_module=exported.mlir_module_serialized)
    shapes = list(outputs)
    # Written out, not one within the other: every eager call passes here.
    if single:
        return lambda tensors: call_custom_kernel(name, fingerprint, inputs=tensors, output_shapes=shapes)[0]
    return lambda tensors: call_custom_kernel(name, fingerprint, inputs=tensors, output_shapes=shapes)


def _fingerprint(exported: Any) -> str:
    """A key of the program that holds no call stack.

    The same kernel then has the same key wherever it is traced from, and torch_tpu's cache of compiled programs
    serves all processes.
    """
    from jax.interpreters import mlir

    with mlir.make_ir_context():
        module = mlir.ir.Module.parse(exported.mlir_module())
        text = module.operation.get_asm(enable_debug_info=False)
    return hashlib.blake2b(str(text).encode(), digest_size=16).hexdigest()


def _public_program(name: str, exported: Any, arguments: Arguments, *, single: bool) -> Program:
    import jax

    _warn_slow_dispatch()
    count = len(tensors_of(arguments))
    places = [
        inspect.Parameter(f"x{i}", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=jax.Array)
        for i in range(count)
    ]
    results = types.GenericAlias(tuple, (jax.Array,) * len(exported.out_avals))

    def function(*arrays: Any) -> Any:
        return tuple(jax.tree.leaves(exported.call(*arrays)))

    function.__signature__ = inspect.Signature(places, return_annotation=results)  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax_op announces that it is experimental
        op = torch.tpu.pallas.jax_op(f"{name}_{next(_public_name)}", function)  # type: ignore[attr-defined]
    return lambda tensors: op(*tensors)[0] if single else list(op(*tensors))


@functools.cache
def _warn_slow_dispatch() -> None:
    _logger.warning(
        "this torch_tpu has no direct kernel calls: ops go through torch.tpu.pallas.jax_op, which costs tens "
        "of microseconds more per eager call"
    )
