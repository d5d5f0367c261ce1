"""`tpu-kernels dashboard`: one page that shows what works, how fast, and where."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import dashboard as page
from ..dashboard.collect import CASES
from ..errors import DashboardError
from ..files import replace_file
from ..hub.manage.catalogue import list_kernels
from .output import progress, sources_of

PAGE, FACTS = "index.html", "facts.json"


def dashboard(
    out: Annotated[Path, typer.Option(help="The folder to write index.html and facts.json to.")],
    source: Annotated[
        str, typer.Option(help="The registry whose kernels are shown: its folder or URL.")
    ] = "registry",
    case: Annotated[
        list[str] | None, typer.Option(help=f"A model's layer; {', '.join(CASES)} unless given.")
    ] = None,
    tpu: Annotated[str | None, typer.Option(help="Only these generations, comma-separated.")] = None,
    check: Annotated[
        list[Path] | None, typer.Option(help="What `tpu-kernels check --json` wrote about a kernel.")
    ] = None,
    decode: Annotated[
        list[Path] | None, typer.Option(help="What `tpu-kernels bench decode --json` wrote.")
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(help="ORG/NAME=FILE: what a comparison with others' kernels wrote, as JSON."),
    ] = None,
    history: Annotated[
        list[Path] | None, typer.Option(help="The facts.json of an earlier page, for the trend.")
    ] = None,
) -> None:
    """Compile and simulate the kernels of a registry, and show that with other reports on one HTML page.

    Example: tpu-kernels dashboard --out site/dashboard --decode decode.json

    Nothing is run on a TPU. What the compiler said is kept, so that a second page takes seconds. The facts.json of the
    page that is replaced becomes part of its history.
    """
    earlier = [*(history or ()), *([out / FACTS] if (out / FACTS).exists() else [])]
    before = [_facts(path) for path in earlier]
    models = [facts for path in decode or () for facts in page.read_decode(path)]
    compared = [facts for each in peers or () for facts in _peers(each)]
    checks = dict(page.read_checks(path) for path in check or ())
    listed, failures = list_kernels(sources_of(source))
    if failures:
        raise failures[0].error
    kernels = [(each.kernel, max(each.versions)) for each in listed if each.alias_of is None]
    generations = [name.strip() for name in tpu.split(",")] if tpu else None
    with progress("compiling", len(kernels)) as begin:
        facts = page.collect(kernels, case or CASES, source=source, generations=generations, on_kernel=begin)
    shown = [
        kernel.model_copy(update={"checks": checks.get(kernel.name.partition("/")[2], {})})
        for kernel in facts.kernels
    ]
    facts = facts.model_copy(
        update={"kernels": tuple(shown), "models": tuple(models), "peers": tuple(compared)}
    ).after(before)
    out.mkdir(parents=True, exist_ok=True)
    replace_file(out / FACTS, facts.model_dump_json(indent=1).encode())
    replace_file(out / PAGE, page.render(facts).encode())
    typer.echo(out / PAGE)


def _facts(path: Path) -> page.Facts:
    try:
        return page.Facts.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DashboardError(
            f"{path} holds no facts of a dashboard, or another version's; move it away to start anew: {error}"
        ) from error


def _peers(each: str) -> list[page.PeerFacts]:
    kernel, found, path = each.partition("=")
    if not found or "/" not in kernel:
        raise DashboardError(f"--peers takes ORG/NAME=FILE, not {each!r}")
    return page.read_peers(Path(path), kernel)
