"""`tpu-kernels publish`: a kernel, checked and built, to the Hub, a folder or a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import authoring
from .output import AsJson, print_json

Yes = Annotated[bool, typer.Option("--yes", help="Do it. Without, only what would be done is said.")]
To = Annotated[
    str, typer.Option(help="hub:ORG/NAME, or a registry: a folder, or a URL such as gs://bucket/kernels.")
]


def publish(
    to: To,
    source: Annotated[Path, typer.Argument(help="The folder of a kernel's source.")] = Path(),
    yes: Yes = False,
    quick: Annotated[
        bool, typer.Option(help="Make a quick check; the card then has no simulated times.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check, build and publish a kernel.

    Example: tpu-kernels publish fast-norm --to hub:acme/fast-norm --yes

    A changed interface wants a new version in build.toml. Changed files under the same version are a new revision of
    it; those who have locked the former one keep it. The card gets the figures of the check.
    """
    done = authoring.publish(source, to, dry_run=not yes, quick=quick)
    if as_json:
        print_json(**vars(done))
        return
    would = "" if done.done or done.kind == "unchanged" else "would be "
    typer.echo(f"{done.repo_id} v{done.version} ({done.id}) in {to}: {would}{done.kind}")
    for change in ("added", "changed", "removed"):
        for path in getattr(done, change):
            typer.echo(f"  {change}: {path}")
    if would:
        typer.echo("nothing was written; --yes does it")
