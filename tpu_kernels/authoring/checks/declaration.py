"""Whether a kernel has what it declares: ops with their dtypes and gradients, layers, functions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...analysis.export import is_op
from ..examples import declared, edges
from ..project import CONFIG_FILE
from .report import Finding
from .subject import Subject, describe


def check_declaration(subject: Subject) -> Iterator[Finding]:
    """Declarations: what build.toml promises is there, and what is there is promised."""
    tpu = subject.project.config.tpu
    if tpu is None:
        return
    module = subject.module
    public = getattr(module, "__all__", None)
    if public is None:
        yield subject.error("the package has no __all__, which is what its version is a promise of")
    ops = {name: getattr(module, name) for name in dir(module) if is_op(getattr(module, name))}
    for name, declaration in tpu.ops.items():
        line = subject.line_in(CONFIG_FILE, f"[tpu.ops.{name}]")
        if name not in ops:
            yield Finding("error", f"tpu.ops.{name}: the package exports no such op", CONFIG_FILE, line)
            continue
        if declaration.differentiable != bool(getattr(ops[name], "differentiable", ())):
            yield Finding(
                "error",
                f"tpu.ops.{name}: differentiable is {str(declaration.differentiable).lower()}, but the op is "
                f"{'' if ops[name].differentiable else 'not '}declared with differentiable=[...]",
                CONFIG_FILE,
                line,
            )
        if ops[name].cost is None:
            yield Finding("warning", f"the op {name} has no cost: its roofline is not known")
    for name in ops.keys() - tpu.ops.keys():
        yield Finding(
            "error", f"tpu.ops does not declare the op {name}, which the package exports", CONFIG_FILE
        )
    for point, names in tpu.provides.items():
        for registered, attribute in names.items():
            if not hasattr(module, attribute):
                yield Finding(
                    "error",
                    f"tpu.provides.{point}.{registered}: the package exports no {attribute!r}",
                    CONFIG_FILE,
                    subject.line_in(CONFIG_FILE, f'[tpu.provides."{point}"]'),
                )
    yield from _tables(subject)
    yield from _examples(subject)


def _tables(subject: Subject) -> Iterator[Finding]:
    from ...ops.tables import FOLDER, parse

    for path, content in subject.project.package.items():
        folder, _, name = path.rpartition("/")
        if folder != FOLDER:
            continue
        file, generation = f"torch-ext/{subject.project.config.general.python_name}/{path}", Path(name).stem
        if generation not in subject.generations:
            yield Finding(
                "error",
                f"the table is for {generation}, a generation that {CONFIG_FILE} does not declare: add it to "
                "tpu.generations, or remove the table",
                file,
            )
        if not parse(content, file):
            yield Finding("warning", "the table has no entries that can be read", file)


def _examples(subject: Subject) -> Iterator[Finding]:
    tpu = subject.project.config.tpu
    assert tpu is not None
    examples = declared(subject.module)
    for example in examples:
        try:
            example.op(**example.tensors(), **example.static)
        except Exception as error:  # noqa: BLE001  whatever the op raises is the answer
            yield subject.error(f"the example {example.name!r} is refused: {describe(error)}", error)
    for name, declaration in tpu.ops.items():
        of_op = [example for example in examples if example.op.__name__ == name]
        if examples and not of_op:
            yield Finding("warning", f"the op {name} has no example in cases.py: nothing of it was run")
        used = {dtype for example in of_op for _, dtype in example.shapes().values()}
        for dtype in (each for each in declaration.dtypes if of_op and each not in used):
            if not dtype.startswith(("bfloat", "float16", "float32")):
                # Of quantised operands, which do not just take the place of others.
                yield Finding("warning", f"the op {name} has no example in {dtype}: nothing of that was run")
                continue
            variants = [
                each for each in edges(of_op[0], declaration.dtypes) if each.name.endswith(f", {dtype}")
            ]
            if not any(each.accepted() for each in variants):
                message = f"tpu.ops.{name}: the op does not take {dtype}, as it declares"
                yield Finding(
                    "error", message, CONFIG_FILE, subject.line_in(CONFIG_FILE, f"[tpu.ops.{name}]")
                )
