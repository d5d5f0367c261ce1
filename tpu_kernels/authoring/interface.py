"""A kernel's interface: what its version is a promise of. Read from a build's files; nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from ..hub.layers import Layer, read_layers
from ..hub.metadata import Metadata


@dataclass(frozen=True)
class Interface:
    """What users of a kernel may rely on.

    Attributes:
        functions: The parameters of each public function, by name: with what stands for their kind before the
            name, and whether they may be left out. None where something public is no function of the package.
        layers: Of the package.
        metadata: With the ops, the generations, and what they can be used as.
    """

    functions: Mapping[str, tuple[tuple[str, bool], ...] | None]
    layers: tuple[Layer, ...]
    metadata: Metadata


def read_interface(files: Mapping[str, bytes], metadata: Metadata) -> Interface:
    """The interface of a build, from the files of its variant folder."""
    trees = {path: ast.parse(content) for path, content in files.items() if path.endswith(".py")}
    functions = {name: _parameters(trees, "__init__.py", name) for name in _public(trees["__init__.py"])}
    return Interface(functions, tuple(read_layers(files)), metadata)


def broken_promises(former: Interface, new: Interface) -> list[str]:
    """What of a former interface a new one does not keep; more than it is no harm.

    Example:
        >>> old, new = {"__init__.py": b"__all__ = ['f']\\ndef f(x): ..."}, {"__init__.py": b"__all__ = []"}
        >>> metadata = Metadata.model_construct(tpu=None)
        >>> broken_promises(read_interface(old, metadata), read_interface(new, metadata))
        ['f is gone']
    """
    broken = []
    for name, parameters in former.functions.items():
        if name not in new.functions:
            broken.append(f"{name} is gone")
            continue
        now = new.functions[name]
        if parameters is None or now is None:
            continue
        if not _takes(now, parameters):
            broken.append(f"{name}({_text(parameters)}) became {name}({_text(now)})")
    broken += _layers(former.layers, new.layers)
    broken += _metadata(former.metadata, new.metadata)
    return broken


def _takes(now: tuple[tuple[str, bool], ...], former: tuple[tuple[str, bool], ...]) -> bool:
    """Whether a function with the parameters `now` takes every call that fits the `former` ones."""
    by_place = [name for name, _ in former if name[-1] != "=" and name[0] != "*"]
    if [name for name, _ in now][: len(by_place)] != by_place:
        return False
    optional, names = dict(former), {name.rstrip("=") for name, _ in now}
    if any(name.rstrip("=") not in names for name in optional):
        return False
    return all(may_be_left_out or not optional.get(name, True) for name, may_be_left_out in now)


def _layers(former: tuple[Layer, ...], new: tuple[Layer, ...]) -> list[str]:
    now = {layer.name: layer for layer in new}
    broken = [f"the layer {layer.name} is gone" for layer in former if layer.name not in now]
    for layer in former:
        for flag in ("has_backward", "can_torch_compile"):
            if layer.name in now and getattr(layer, flag) and not getattr(now[layer.name], flag):
                broken.append(f"the layer {layer.name} has no {flag} any more")
    return broken


def _metadata(former: Metadata, new: Metadata) -> list[str]:
    if former.tpu is None:
        return []
    if new.tpu is None:
        return ["the [tpu] table is gone"]
    broken = [
        f"the generation {each} is gone" for each in former.tpu.generations if each not in new.tpu.generations
    ]
    for name, op in former.tpu.ops.items():
        now = new.tpu.ops.get(name)
        if now is None:
            broken.append(f"the op {name} is gone")
            continue
        broken += [
            f"the op {name} does not take {each} any more" for each in op.dtypes if each not in now.dtypes
        ]
        if op.differentiable and not now.differentiable:
            broken.append(f"the op {name} is not differentiable any more")
    for point, names in former.tpu.provides.items():
        broken += [
            f"it cannot be used as {point} {each} any more"
            for each in names
            if each not in new.tpu.provides.get(point, {})
        ]
    return broken


def _public(tree: ast.Module) -> list[str]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List() | ast.Tuple() as names):
                return [str(each) for each in ast.literal_eval(names)]
    return []


def _parameters(
    trees: Mapping[str, ast.Module], path: str, name: str, depth: int = 8
) -> tuple[tuple[str, bool], ...] | None:
    """The parameters of a function that a module defines, or imports from another one of the package."""
    for node in trees[path].body if depth and path in trees else ():
        match node:
            case ast.FunctionDef(name=defined) if defined == name:
                return _signature(node.args)
            case ast.ImportFrom(module=module, level=level, names=names) if level:
                for alias in names:
                    if (alias.asname or alias.name) == name:
                        folders = path.split("/")[:-level]
                        inner = "/".join([*folders, *(module or alias.name).split(".")])
                        target = next((f for f in (f"{inner}.py", f"{inner}/__init__.py") if f in trees), "")
                        return _parameters(trees, target, alias.name, depth - 1)
    return None


def _signature(arguments: ast.arguments) -> tuple[tuple[str, bool], ...]:
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    found = [(each.arg, place >= required) for place, each in enumerate(positional)]
    if arguments.vararg:
        found.append((f"*{arguments.vararg.arg}", True))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((f"{each.arg}=", default is not None))
    if arguments.kwarg:
        found.append((f"**{arguments.kwarg.arg}", True))
    return tuple(found)


def _text(parameters: tuple[tuple[str, bool], ...]) -> str:
    return ", ".join(f"[{name}]" if optional else name for name, optional in parameters)
