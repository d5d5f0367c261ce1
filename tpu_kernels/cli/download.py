"""`tpu-kernels download`: kernels fetched and verified, not loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import TpuKernelsError
from ..hub.lock_source import LockSource
from ..hub.manage.download import DownloadedKernel
from ..hub.manage.download import download as download_kernel
from .output import AsJson, Project, SourceName, Trusted, parse_references, print_json, progress, sources_of


def download(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Kernels: org/name, or org/name@N for one version. With --project, else all it locks.",
            show_default=False,
        ),
    ] = None,
    version: Annotated[int | None, typer.Option(help="The version of those that name none.")] = None,
    to: Annotated[
        Path | None, typer.Option(help="Also put each into this folder, as TO/org/name for LOCAL_KERNELS.")
    ] = None,
    source: SourceName = None,
    project: Project = None,
    trust: Trusted = None,
    as_json: AsJson = False,
) -> None:
    """Fetch and verify kernels without loading them.

    Example: tpu-kernels download tpu-kernels/ragged-dot@1

    Of all that a project locks, as for an image that runs offline: tpu-kernels download --project .

    Also those that they depend on. What is in the cache is not fetched again, and an interrupted download goes
    on where it stopped. Exit status 1 if one of them failed; the others are there.
    """
    sources = sources_of(source, trust, project)
    if names:
        references = parse_references(names, version)
    elif project is not None:
        locks = [source.lock for source in sources if isinstance(source, LockSource)]
        references = [kernel.reference for lock in locks for kernel in lock.kernels]
    else:
        raise typer.BadParameter("name kernels, or with --project whose locked ones")
    done: list[DownloadedKernel] = []
    failures: dict[str, TpuKernelsError] = {}
    with progress("downloading", len(references)) as begin:
        for reference in references:
            begin(reference.repo_id)
            try:
                done += [kernel for kernel in download_kernel(reference, sources, to) if kernel not in done]
            except TpuKernelsError as error:
                failures[str(reference)] = error
    if as_json:
        kernels = [
            {
                "repo-id": kernel.repo_id,
                "version": kernel.metadata.version,
                "id": kernel.metadata.id,
                "address": kernel.address,
                "path": kernel.path,
            }
            for kernel in done
        ]
        failed = [{"kernel": name, "error": failure} for name, failure in failures.items()]
        print_json(kernels=kernels, failures=failed)
    else:
        for kernel in done:
            typer.echo(f"{kernel.repo_id} v{kernel.metadata.version}: {kernel.path}")
        for name, failure in failures.items():
            typer.echo(f"failed: {name}: {failure}", err=True)
    raise typer.Exit(1 if failures else 0)
