"""From a torch module on the meta device to StableHLO as torch_tpu makes it; calls of kernels are cut out of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from .records import CutCall


def export(part: Any, kernels: Mapping[str, tuple[str, int] | None]) -> tuple[bytes, tuple[CutCall, ...]]:
    """Exports a module that has an `example` call and names its `donated` arguments.

    Args:
        part: A module on the meta device.
        kernels: Whose ops are cut out, by the ops' namespace.

    Returns:
        StableHLO as a portable artifact, in which each op's location is the module that it is in; and the calls.
    """
    from torch_tpu._internal.compile import tpu_torch_compile as tracer
    from torch_tpu._internal.export.export import fx_to_mlir

    with torch.no_grad():
        exported = torch.export.export(part, part.example).run_decompositions(
            {torch.ops.aten.cumsum.default: _cumsum}
        )
    module = exported.graph_module
    device = torch.device("tpu", 0)
    for node in module.graph.nodes:
        _locate(node)
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
    calls = _cut(module.graph, kernels)
    module.recompile()
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    donated = [place for place, node in enumerate(inputs) if node.name in ("key", "value") and part.donated]
    arguments = [
        tracer.placeholder(list(node.meta["val"].shape), node.meta["val"].dtype, False).to(device)
        for node in inputs
    ]
    made = fx_to_mlir(module.to(device), arguments, donated_inputs=donated)
    return made.serialize_portable_artifact(), calls


def _cumsum(x: torch.Tensor, axis: int, *, dtype: torch.dtype | None = None) -> Any:
    """Of a few numbers. torch_tpu writes a scan, which libtpu's version of StableHLO does not know yet."""
    if x.dim() != 1:
        return NotImplemented
    return torch.tril(x.expand(x.shape[0], -1)).sum(1, dtype=dtype)


def _locate(node: Any) -> None:
    """Gives an op the place in the model, in the form of a source location, which the compiler keeps."""
    stack = node.meta.get("nn_module_stack")
    if stack:
        path, kind = list(stack.values())[-1]
        name = getattr(kind, "__name__", str(kind).rpartition(".")[2])
        node.meta["stack_trace"] = f'File "{path or "model"}:{name}", line 1, in forward\n    op'


def _cut(graph: Any, kernels: Mapping[str, tuple[str, int] | None]) -> tuple[CutCall, ...]:
    calls = []
    [output] = graph.find_nodes(op="output")
    results = list(output.args[0])
    last = graph.find_nodes(op="placeholder")[-1]
    for node in list(graph.nodes):
        if not (isinstance(node.target, OpOverload) and node.target.namespace in kernels):
            continue
        call, tensors = _read(node, kernels[node.target.namespace])
        calls.append(call)
        # Weights, and what is a result already, need no place of their own.
        results += [x for x in tensors if x.op != "placeholder" and x not in results]
        with graph.inserting_after(last):
            last = graph.placeholder(f"result_of_{call.op}_{len(calls)}")
        last.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(last)
        graph.erase_node(node)
    output.args = (tuple(results),)
    graph.lint()
    return tuple(calls)


def _read(node: Any, kernel: tuple[str, int] | None) -> tuple[CutCall, list[Any]]:
    arrays: dict[str, tuple[tuple[int, ...], str]] = {}
    static, tensors = {}, []
    schema = node.target._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, node.args, strict=False)} | node.kwargs
    for name, value in given.items():
        if isinstance(value, torch.fx.Node):
            tensor = value.meta["val"]
            arrays[name] = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            tensors.append(value)
        elif value is not None:
            static[name] = value
    op = node.target._schema.name.partition("::")[2]
    return CutCall(op=op, kernel=kernel, arrays=arrays, static=static), tensors
