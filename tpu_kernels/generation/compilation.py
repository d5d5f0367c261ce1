"""torch.compile for steps that own their buffers: no guards, and what they write to is donated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..log import warn_once


def compile_step(
    function: Callable[..., Any], on_compiled: Callable[[Any], None] | None = None
) -> Callable[..., Any]:
    """Compiles `function` for device tpu, for good: who calls it answers for the same shapes and structure each time.

    Checking them is most of a small step's host time, so no guards are kept. Tensors that `function` writes to are
    donated where torch_tpu `donates`; else XLA copies each of them in every call, key/value caches first of all.

    Args:
      function: what to compile.
      on_compiled: is given torch_tpu's `TpuCompileDebug` of each graph, with its StableHLO.
    """
    options: dict[str, Any] = {
        "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
        # A graph without donation may be in torch's cache on disk, under the same key.
        "serializable": False,
        "debug_callback": on_compiled,
    }
    backend = _donating_backend() or "tpu"
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False, options=options)


def donates() -> bool:
    """Whether this torch_tpu lets buffers be donated; where not, the log says what that costs."""
    possible = _donating_backend() is not None
    if not possible:
        warn_once("this torch_tpu does not let buffers be donated: each call copies the key/value cache")
    return possible


@functools.cache
def _donating_backend() -> Any:
    """torch_tpu's backend, donating; None where torch_tpu is not built as it was when this was written."""
    try:
        from torch_tpu._internal.compile import TpuBackend
        from torch_tpu._internal.compile.compiler import StaticCompiler
    except ImportError:
        return None
    if not hasattr(TpuBackend, "_compile_graph_module"):
        return None

    class DonatingBackend(TpuBackend):  # type: ignore[misc]
        def _compile_graph_module(self, compiler: Any, is_forward: bool, *rest: Any) -> Any:
            *_, graph, inputs = rest
            base = getattr(compiler, "base_compiler", None)
            if is_forward and isinstance(base, StaticCompiler):
                compiler.base_compiler = functools.partial(_compile_donating, base, _written(graph, inputs))
            return super()._compile_graph_module(compiler, is_forward, *rest)

    return DonatingBackend()


def _compile_donating(
    compiler: Any, written: frozenset[str], graph: Any, inputs: Sequence[Any], **options: Any
) -> Any:
    names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    both = zip(names, inputs, strict=True)
    tensors = [name for name, each in both if isinstance(each, torch.Tensor)]
    donated = [place for place, name in enumerate(tensors) if name in written]
    return compiler(graph, inputs, donated_inputs=donated or None, **options)


def _written(graph: Any, inputs: Sequence[Any]) -> frozenset[str]:
    """The inputs of a graph that it writes to, as AOTAutograd has found, by the names that torch_tpu's parts of the
    graph keep. None where there is more than one part, cut at collectives: a later one may read what was donated."""
    context = torch._guards.TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    collectives = any("c10d" in str(node.target) for node in graph.graph.nodes)
    if metadata is None or len(metadata.input_info) != len(inputs) or collectives:
        return frozenset()
    names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    both = zip(names, metadata.input_info, strict=True)
    return frozenset(name for name, info in both if info.mutates_data)
