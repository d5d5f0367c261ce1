"""`tpu-kernels info`: what a kernel is, needs and offers."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import device
from ..analysis.sizes import format_bytes
from ..hub.layers import Layer
from ..hub.manage.catalogue import Description, describe
from ..hub.metadata import Tpu
from .output import (
    AsJson,
    Project,
    SourceName,
    Trusted,
    make_table,
    parse_references,
    print_json,
    show,
    sources_of,
)


def info(
    name: Annotated[str, typer.Argument(help="The kernel: org/name, or org/name@N for one version.")],
    version: Annotated[int | None, typer.Option(help="The version; else the newest.")] = None,
    source: SourceName = None,
    project: Project = None,
    trust: Trusted = None,
    as_json: AsJson = False,
) -> None:
    """Say what a kernel is, needs and offers.

    Example: tpu-kernels info tpu-kernels/ragged-dot

    Of a kernel on the Hub the metadata and the card are fetched, and nothing of it is run. Exit status 1 if
    it does not run here.
    """
    [reference] = parse_references([name], version)
    description = describe(reference, sources_of(source, trust, project))
    runs = description.explanation.build is not None
    if as_json:
        print_json(
            repo_id=description.repo_id,
            source=description.source,
            address=description.address,
            card=description.card,
            runs_here=runs,
            unmet=[str(requirement) for requirement in description.unmet],
            path=description.path,
            size=description.size,
            layers=description.layers,
            metadata=description.metadata,
        )
    else:
        _print(description)
    raise typer.Exit(0 if runs else 1)


def _print(description: Description) -> None:
    metadata = description.metadata
    tpu = metadata.tpu or Tpu()
    table = make_table(f"{description.repo_id} v{metadata.version}", "", "")
    table.show_header = False
    if description.card:
        table.add_row("about", description.card)
    table.add_row("license", metadata.license)
    table.add_row("from", f"{description.source}: {description.address}")
    table.add_row("module", metadata.id)
    table.add_row("runs here", _runs(description))
    table.add_row("generations", _generations(tpu))
    table.add_row("requires", ", ".join(f"{name}{spec}" for name, spec in tpu.requires.items()) or "nothing")
    for name, op in tpu.ops.items():
        gradient = "differentiable" if op.differentiable else "no gradient"
        details = [", ".join(op.dtypes), gradient, op.constraints]
        table.add_row(f"op {name}", "; ".join(filter(None, details)))
    for point, names in tpu.provides.items():
        table.add_row(point, ", ".join(f"tpu_{name}" for name in names))
    for layer in description.layers or ():
        table.add_row(f"layer {layer.name}", _abilities(layer))
    digest = metadata.digest
    table.add_row("digests", f"{digest.algorithm} of {len(digest.files)} files" if digest else "none")
    if description.path is not None and description.size is not None:
        table.add_row("here", f"{description.path} ({format_bytes(description.size)})")
    else:
        table.add_row("here", "no; get_kernel or tpu-kernels download fetches it")
    show(table)


def _runs(description: Description) -> str:
    return "yes" if description.explanation.build else f"no: {description.explanation.outcome}"


def _abilities(layer: Layer) -> str:
    gradient = {True: "differentiable", False: "no gradient"}.get(
        layer.has_backward,  # type: ignore[arg-type]
        "does not say whether it has a gradient (has_backward), and stock kernels trains with it",
    )
    return f"{gradient}; {'' if layer.can_torch_compile else 'not '}for torch.compile"


def _generations(tpu: Tpu) -> str:
    names = ", ".join(tpu.generations) or "not said"
    here = device.current().generation
    return names if here is None else f"{names} (here: {here})"
