"""From a function and its arguments to a StableHLO program that another process can compile."""

from __future__ import annotations

import base64
import functools
import hashlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import AnalysisError
from .blocks import Block, read_blocks
from .target import CompileTarget

# A Mosaic kernel within the text of a program: MLIR bytecode in base64, in JSON, in an MLIR string.
_KERNEL_BODY = re.compile(r"(\\22body\\22: ?\\22)([A-Za-z0-9+/=]+)(\\22)")


@dataclass(frozen=True)
class Program:
    """A function lowered for one target.

    Attributes:
        module: StableHLO, serialized as a portable artifact.
        fingerprint: Hash of the program without debug information, so that it stays the same when the
            program is traced from elsewhere or its source moves to other lines.
        devices: How many the program is partitioned over.
        kernels: The kernels in it, by name, and their arrays in VMEM.
        every_schedule: The schedules of XLA's own ops are kept too, not only those of kernels.
    """

    module: bytes
    fingerprint: str
    devices: int
    kernels: dict[str, tuple[Block, ...]]
    every_schedule: bool = False


@dataclass(frozen=True)
class Bound:
    """A function of arrays, everything else being bound to it, and the arrays' shapes."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def is_op(value: Any) -> bool:
    """Whether `value` is an op. Kernels bring their own copy of `tpu_kernels.ops`, so its class does not tell."""
    return hasattr(value, "jax_fn")


def bind(fn: Any, args: Sequence[Any], static: Mapping[str, Any], generation: str) -> Bound:
    """Binds what does not vary to `fn`, and reduces its array arguments to shapes and dtypes.

    Args:
        fn: A function of arrays (trees of them, in general), or an op declared with `tpu_kernels.ops`.
        args: Arrays, `jax.ShapeDtypeStruct`s or torch tensors; trees of these.
        static: Keyword arguments.
        generation: What an op is told it is compiled for.

    Raises:
        AnalysisError: The op has other arguments.
        TpuKernelsError: The op refuses the arguments' shapes or dtypes.
    """
    import jax

    if not is_op(fn):
        function = functools.partial(fn, **static)
        return Bound(
            _presented(function, fn, _signature(function)), tuple(jax.tree.map(_shape_of, tuple(args)))
        )
    try:
        call = fn.__signature__.bind(*args, **static)
    except TypeError as error:
        raise AnalysisError(f"{fn.__name__}{fn.__signature__} was given other arguments: {error}") from error
    # The op's own checks of shapes and dtypes, which its JAX function relies on.
    fn(**jax.tree.map(_meta_tensor, dict(call.arguments)))
    call.apply_defaults()
    arrays: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    for name, value in call.arguments.items():
        leaves = jax.tree.leaves(value)
        if leaves and all(map(_is_array, leaves)):
            arrays[name] = jax.tree.map(_shape_of, value)
        else:
            fixed[name] = _static_of(value)

    def of_arrays(*given: Any) -> Any:
        named = dict(zip(arrays, given, strict=True))
        return fn.jax_fn(**named, **fixed, tpu=generation, interpret=False)

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in arrays]
    return Bound(_presented(of_arrays, fn, inspect.Signature(parameters)), tuple(arrays.values()))


def lower(bound: Bound, target: CompileTarget, donated: tuple[int, ...] = ()) -> Program:
    """Traces a function and lowers it, Pallas kernels included, for `target`. No TPU is needed or opened.

    Args:
        donated: Places of the arguments that results may take the memory of.
    """
    import jax
    import jax.export

    _confine_jax()
    # Unused arguments are kept: torch hands a program all of them, and so they take their memory.
    jitted = jax.jit(bound.function, keep_unused=True, donate_argnums=donated)
    # What a kernel is: a custom call.
    checks = [jax.export.DisabledSafetyCheck.custom_call("ALL")]
    with target.mesh():
        exported = jax.export.export(jitted, platforms=["tpu"], disabled_checks=checks)(*bound.arguments)
    text, kernels = _readable(exported.mlir_module())
    return Program(
        exported.mlir_module_serialized,
        hashlib.sha256(text.encode()).hexdigest(),
        exported.nr_devices,
        dict(map(read_blocks, kernels)),
    )


def _confine_jax() -> None:
    """Keeps JAX, which lowering makes start a client, from taking the TPU.

    Where the program has chosen JAX's platforms, or has run something with JAX, that stays as it is.
    """
    import jax
    from jax._src import xla_bridge

    chosen = os.environ.get("JAX_PLATFORMS") or jax.config.jax_platforms  # type: ignore[attr-defined]
    if not chosen and not xla_bridge.backends_are_initialized():
        jax.config.update("jax_platforms", "cpu")


def _presented(
    function: Callable[..., Any], fn: Any, signature: inspect.Signature | None
) -> Callable[..., Any]:
    """`function` with the name of `fn` and its arguments' names, which the compiler's messages show."""

    def call(*arrays: Any) -> Any:
        return function(*arrays)

    call.__name__ = call.__qualname__ = getattr(fn, "__name__", type(fn).__name__)
    if signature is not None:
        call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """None where a built-in function has none, or static arguments do not fit it (which tracing will say)."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _is_tensor(value: Any) -> bool:
    # Nobody holds a tensor without having imported torch.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _shape_of(value: Any) -> Any:
    """Shape and dtype of an array; Python's numbers are left as they are."""
    import jax

    if _is_tensor(value):
        from ..ops.dtypes import NARROWED, to_jax_dtype

        return jax.ShapeDtypeStruct(tuple(value.shape), to_jax_dtype(NARROWED.get(value.dtype, value.dtype)))
    if _is_array(value):
        dtype = jax.dtypes.canonicalize_dtype(value.dtype)
        return jax.ShapeDtypeStruct(value.shape, dtype, sharding=_abstract(getattr(value, "sharding", None)))
    return value


def _abstract(sharding: Any) -> Any:
    """`sharding` where it is over the devices of some TPU; None where it is over those of this process."""
    import jax

    if isinstance(sharding, jax.sharding.NamedSharding) and isinstance(
        sharding.mesh, jax.sharding.AbstractMesh
    ):
        return sharding
    return None


def _meta_tensor(value: Any) -> Any:
    """A tensor like an array, without values."""
    import torch

    if _is_tensor(value):
        return value.to("meta")
    if _is_array(value):
        return torch.empty(tuple(value.shape), dtype=getattr(torch, str(value.dtype)), device="meta")
    return value


def _static_of(value: Any) -> Any:
    """A static argument of an op as its JAX function takes it."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype):
        from ..ops.dtypes import to_jax_dtype

        return to_jax_dtype(value)
    return value


def _readable(module: str) -> tuple[str, list[str]]:
    """The text of a module and of the kernels in it, without debug information."""
    from jax.interpreters import mlir
    from jaxlib.mlir import ir
    from jaxlib.mosaic.python import tpu

    kernels: list[str] = []
    with mlir.make_ir_context() as context:
        # Kernels are stored in Mosaic's dialect, under names that only the compiler registers.
        tpu.register_dialect(context)
        context.allow_unregistered_dialects = True

        def without_debug_info(source: str | bytes) -> str:
            return str(ir.Module.parse(source).operation.get_asm(enable_debug_info=False))

        def readable(match: re.Match[str]) -> str:
            kernels.append(without_debug_info(base64.b64decode(match[2])))
            return match[1] + kernels[-1] + match[3]

        text = _KERNEL_BODY.sub(readable, without_debug_info(module))
    return text, kernels
