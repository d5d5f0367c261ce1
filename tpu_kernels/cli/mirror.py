"""`tpu-kernels mirror`: kernels copied into a registry of one's own, for machines without the Hub."""

from __future__ import annotations

from typing import Annotated, cast

import typer

from ..analysis.sizes import format_bytes
from ..hub.configuration import configured_sources
from ..hub.manage.mirror import MirroredBuild, MirrorReport, Versions
from ..hub.manage.mirror import mirror as mirror_kernels
from ..hub.reference import Reference
from ..hub.trust import Trust
from .output import AsJson, Trusted, make_table, print_json, progress, show


def mirror(
    names: Annotated[list[str], typer.Argument(help="Kernels: org/name, or org/name@N for one version.")],
    to: Annotated[str, typer.Option(help="The mirror: a folder, or a URL such as gs://bucket/kernels.")],
    origin: Annotated[
        str, typer.Option("--from", help="Where to copy from: hub, registry, or a registry's folder or URL.")
    ] = "hub",
    versions: Annotated[str, typer.Option(help="all, newest, or numbers with commas between them.")] = "all",
    trust: Trusted = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be copied.")] = False,
    as_json: AsJson = False,
) -> None:
    """Copy kernels to a folder or bucket.

    Example: tpu-kernels mirror org/name --to gs://bucket/kernels

    Load from it with TPU_KERNELS_SOURCES=gs://bucket/kernels. What is there and right is not copied again, so
    a mirror that was interrupted goes on where it stopped. Exit status 1 if a kernel could not be copied.
    """
    references = [Reference.parse(name) for name in names]
    [source] = configured_sources(origin, Trust.of(trust or False))
    with progress("copying", None) as begin:
        report = mirror_kernels(
            references, to, source, versions=_versions(versions), dry_run=dry_run, on_build=begin
        )
    if as_json:
        print_json(target=to, dry_run=dry_run, **vars(report))
    else:
        _print(report, to)
    raise typer.Exit(1 if report.failures else 0)


def _versions(text: str) -> Versions:
    if text in ("all", "newest"):
        return cast(Versions, text)
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(
            f"--versions {text!r} is no choice of versions; give all, newest, or numbers as in 1,3"
        ) from error


def _print(report: MirrorReport, target: str) -> None:
    if report.builds:
        table = make_table(f"mirror {target}", "kernel", "version", "folder", "what", "size", right=("size",))
        for build in report.builds:
            size = format_bytes(build.size) if build.size is not None else ""
            table.add_row(build.repo_id, str(build.version), build.path, _what(build), size)
        show(table)
    for name in report.skipped:
        show(f"skipped: {name} has no build for TPUs")
    for failure in report.failures:
        typer.echo(f"failed: {failure.kernel}: {failure.error}", err=True)


def _what(build: MirroredBuild) -> str:
    if build.copied is None:
        return "is there" if build.indexed else "would be copied"
    return f"{build.copied} files copied, {build.kept} kept" if build.copied else "is there"
