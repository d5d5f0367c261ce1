"""`tpu-kernels yank`: a published version taken back."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import authoring
from ..errors import InvalidReferenceError
from ..hub.reference import Reference
from .publish import To, Yes


def yank(
    kernel: Annotated[str, typer.Argument(help="The kernel and its version, org/name@N.")],
    to: To,
    yes: Yes = False,
) -> None:
    """Take a published version back.

    Example: tpu-kernels yank acme/fast-norm@1 --to hub:acme/fast-norm --yes

    It is found no more. Its files stay, for those who have locked it.
    """
    reference = Reference.parse(kernel)
    if reference.version is None:
        raise InvalidReferenceError(f"{kernel!r} names no version; give one as in {reference.repo_id}@1")
    authoring.yank(reference.repo_id, reference.version, to, dry_run=not yes)
    typer.echo(f"{reference} in {to}: {'taken back' if yes else 'would be taken back; --yes does it'}")
