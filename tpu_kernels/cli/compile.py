"""`tpu-kernels compile`: what the real TPU compiler says about a kernel's op, without a TPU."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .. import analysis
from ..analysis.export import is_op
from ..analysis.sizes import format_bytes
from .cases import CASE_HELP, KernelArgument, load_cases, load_kernel


def compile(
    kernel: KernelArgument,
    op: Annotated[
        str | None,
        typer.Option(
            help="An op of the kernel, or another of its functions on JAX arrays; the cases' first unless given."
        ),
    ] = None,
    case: Annotated[list[str] | None, typer.Option(help=CASE_HELP)] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(
            help="In place of cases: the shape of an array argument, as in 'bfloat16[64,2048]'; one each."
        ),
    ] = None,
    static: Annotated[
        list[str] | None,
        typer.Option(help="Another argument, as in transpose_rhs=true; the value is JSON, else a string."),
    ] = None,
    tpu: Annotated[
        str, typer.Option(help="Generations (v4, v5e, v5p, v6e, tpu7x) or slices (v6e-8), comma-separated.")
    ] = "v6e",
    version: Annotated[
        int | None, typer.Option(help="The kernel's version; the newest unless given.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that each compile may take.")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reports as JSON.")] = False,
) -> None:
    """Compile an op for TPUs; exit status 1 if it does not compile for one of them.

    Example: tpu-kernels compile ragged-dot --tpu v5e,v6e --case qwen3-30b-a3b:decode:64

    or: tpu-kernels compile ragged-dot --op ragged_dot --tpu v5e,v6e
    --arg 'bfloat16[64,2048]' --arg 'bfloat16[128,1536,2048]' --arg 'int32[128]' --static transpose_rhs=true
    """
    targets = [name.strip() for name in tpu.split(",")]
    if case:
        if arg or static:
            raise typer.BadParameter("--case tells all arguments; give no --arg and no --static with it")
        cases = load_cases(kernel, version, case, targets, op)
        jobs, names = [each.job for each in cases], [f"{each.op} {each.name}" for each in cases]
    elif op and arg:
        shapes = tuple(_shape(text) for text in arg)
        given = dict(_static(text) for text in static or ())
        function = _function(load_kernel(kernel, version), kernel, op)
        bound = {name: _typed(function, name, value) for name, value in given.items()}
        jobs = [analysis.Job(function, shapes, target, bound) for target in targets]
        names = [op] * len(jobs)
    else:
        raise typer.BadParameter("give either --case or --op with an --arg for each of its arrays")
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("compiling", total=len(jobs))
        reports = analysis.compile_many(
            jobs, timeout=timeout, on_report=lambda report: progress.advance(task)
        )
    reports = [
        dataclasses.replace(report, function=name) for report, name in zip(reports, names, strict=True)
    ]
    if as_json:
        typer.echo(json.dumps([json.loads(report.to_json()) for report in reports], indent=2))
    else:
        # Off a terminal rich assumes 80 columns, and what goes to a log file would be folded for nothing.
        console = Console(width=None if sys.stdout.isatty() else 140, emoji=False)
        console.print(_table(reports))
        for report in reports:
            console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    if not all(report.compiled for report in reports):
        raise typer.Exit(1)


def _shape(text: str) -> Any:
    import jax
    import jax.numpy as jnp

    match = re.fullmatch(r"(\w+)\[((?:\d+(?:,\d+)*)?)\]", text.replace(" ", ""))
    if match is None:
        raise typer.BadParameter(f"--arg {text!r} is no shape; give one like bfloat16[64,2048]")
    try:
        dtype = jnp.dtype(match[1])
    except TypeError as error:
        raise typer.BadParameter(
            f"--arg {text!r} has no dtype that JAX knows; bfloat16, float32 and int32 are some"
        ) from error
    return jax.ShapeDtypeStruct([int(axis) for axis in match[2].split(",") if axis], dtype)


def _static(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"--static {text!r} is no argument; give one like transpose_rhs=true")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _typed(function: Any, name: str, value: Any) -> Any:
    """`value`, as a dtype of torch where it names one and the op's argument is one."""
    parameter = inspect.signature(function).parameters.get(name)
    if parameter is None or "torch.dtype" not in str(parameter.annotation):
        return value
    import torch

    return getattr(torch, str(value), value)


def _function(module: ModuleType, kernel: str, op: str) -> Any:
    function = getattr(module, op, None)
    if not callable(function):
        ops = ", ".join(name for name in dir(module) if is_op(getattr(module, name)))
        raise typer.BadParameter(f"{kernel} has no op {op!r}; it has {ops}")
    return function


def _table(reports: list[analysis.CompileReport]) -> Table:
    functions = list(dict.fromkeys(report.function for report in reports))
    table = Table(title="compiled, not run")
    if len(functions) > 1:
        table.add_column("case")
    else:
        table.title = f"{functions[0]}: compiled, not run"
    table.add_column("target")
    table.add_column("compiled")
    for name in ("VMEM", "HBM", "copies", "seconds"):
        table.add_column(name, justify="right")
    for report in reports:
        head = [report.function] * (len(functions) > 1) + [report.target]
        if report.memory is None:
            stage = report.failure.stage if report.failure else ""
            table.add_row(*head, f"no ({stage})", "", "", "", f"{report.seconds:.1f}")
            continue
        copied = sum(moved.bytes for moved in report.overhead)
        table.add_row(
            *head,
            "yes",
            format_bytes(report.vmem_bytes),
            format_bytes(report.memory.total),
            format_bytes(copied),
            f"{report.seconds:.1f}{' (cached)' if report.cached else ''}",
        )
    return table
