"""What the layers of a kernel say about themselves, read from its source; nothing is run.

Stock `kernels` puts a kernel's layer in the place of a model's. It takes one that does not say `has_backward` for
differentiable, and one that does not say `can_torch_compile` for one that breaks a graph.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Layer:
    """A layer; None is what it does not say."""

    name: str
    has_backward: bool | None = None
    can_torch_compile: bool | None = None


def read_layers(sources: Mapping[str, bytes]) -> list[Layer]:
    """The layers among a kernel's sources, by their path in the variant folder: the classes in `layers`.

    A class is a layer if it derives from `torch.nn.Module` there. What cannot be parsed has none.

    Example:
        >>> read_layers({"layers.py": b"class Silu(nn.Module):\\n    has_backward = False"})
        [Layer(name='Silu', has_backward=False, can_torch_compile=None)]
    """
    found: dict[str, Layer] = {}
    for path, content in sorted(sources.items()):
        if path == "layers.py" or (path.startswith("layers/") and path.endswith(".py")):
            for node in _classes(content):
                bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                inherited = next((found[base] for base in bases if base in found), None)
                if "Module" in bases or inherited is not None:
                    layer = replace(inherited or Layer(node.name), name=node.name)
                    found[node.name] = replace(layer, **_flags(node))
    return [layer for layer in found.values() if not layer.name.startswith("_")]


def _classes(content: bytes) -> Iterator[ast.ClassDef]:
    try:
        module = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    yield from (node for node in module.body if isinstance(node, ast.ClassDef))


def _flags(node: ast.ClassDef) -> dict[str, Any]:
    flags = {}
    for statement in node.body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=bool(value)))
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=bool(value)))
            ) if name in ("has_backward", "can_torch_compile"):
                flags[name] = value
    return flags
