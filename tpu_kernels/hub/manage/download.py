"""Downloading: kernels fetched and verified, not loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import CopyError
from ...files import replace_folder
from ..explanation import ResolvedBuild
from ..layout import VARIANT
from ..metadata import Metadata
from ..reference import Reference
from ..resolve import resolve
from ..sources import Source
from ..verify import verify
from .artifact import fetch_artifact


@dataclass(frozen=True)
class DownloadedKernel:
    """A kernel that is on this machine and verified; `path` is its variant folder."""

    repo_id: str
    address: str
    path: Path
    metadata: Metadata


def download(
    reference: Reference, sources: Sequence[Source], to: Path | None = None
) -> list[DownloadedKernel]:
    """Fetches and verifies the build that `get_kernel` would load, after those it depends on; runs none.

    Args:
        to: Also put each in this folder, as the kernel repository `<to>/org/name`, which `get_local_kernel`
            and `LOCAL_KERNELS` take. A former download of the kernel is replaced.

    Raises:
        CopyError: `to` cannot be written.
        TpuKernelsError: As `get_kernel` does.
    """
    return [_download(build, to) for build in resolve(reference, sources).unwrap().tree()]


def _download(build: ResolvedBuild, to: Path | None) -> DownloadedKernel:
    repo_id = build.repo_id
    assert repo_id is not None  # only a build that was named by its folder has none
    if to is None:
        return DownloadedKernel(repo_id, build.address, verify(build).path, build.metadata)
    path = to / repo_id / "build" / VARIANT
    replace_folder(path, fetch_artifact(build).files, CopyError)
    return DownloadedKernel(repo_id, build.address, path, build.metadata)
