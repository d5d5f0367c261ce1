"""Publishing: a checked kernel, built, in the place of its version, by the rules that versions have.

A version is a promise of an interface. A changed interface wants a new version; changed files under the same one are a
new revision of it: a commit on the Hub, another folder in a registry. What was published before stays reachable for
those who have locked it.
"""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .. import __version__
from ..errors import KernelNotFoundError, PublishError
from ..hub.layout import CARD_FILE, METADATA_FILE, VARIANT
from ..hub.metadata import Metadata, parse_json
from .builder import BuiltKernel, assemble
from .card import fill_card
from .checks.report import Report
from .checks.runner import check
from .interface import broken_promises, read_interface
from .targets import parse_target

Kind = Literal["new version", "new revision", "unchanged"]
_PREFIX = f"build/{VARIANT}/"


@dataclass(frozen=True)
class Publication:
    """What is published, or would be.

    Attributes:
        repo_id, version: Of the kernel.
        target: Where to.
        kind: What it is there; `unchanged` is not published again.
        id: Of the build.
        added, changed, removed: Its files, beside those that are there under this version.
        done: Whether it was published.
        report: What checking it came to.
    """

    repo_id: str
    version: int
    target: str
    kind: Kind
    id: str
    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    done: bool
    report: Report


def publish(
    source: str | Path, to: str, *, dry_run: bool = True, quick: bool = False, report: Report | None = None
) -> Publication:
    """Checks, builds and publishes the kernel whose source is in a folder.

    Args:
        source: The folder.
        to: `hub:ORG/NAME`; or a registry, which may be new: a folder, or a URL such as `gs://bucket/kernels`.
        dry_run: Only say what would be done.
        quick: Makes a quick check; the card then has no simulated times.
        report: What `check` has said of this very source, in place of checking it now.

    Raises:
        BuildError, InvalidMetadataError: It cannot be built.
        PublishError: A check failed, its interface is not the one that was published under its version, or the Hub
            refuses.
        SourceUnavailableError, CopyError: The registry cannot be read or written.

    Example:
        >>> from tpu_kernels.authoring import publish
        >>> publish("fast-norm", "hub:acme/fast-norm").kind  # doctest: +SKIP
        'new version'
    """
    source, target = Path(source).resolve(), parse_target(to)
    kernel = assemble(source, _provenance(source))
    kernel = dataclasses.replace(kernel, repo_id=target.repo_id(kernel.repo_id))
    former = target.published(kernel.repo_id, kernel.metadata.version)
    if former is not None:
        _check_promises(kernel, former)
    report = report or check(source, quick=quick)
    if report.id != kernel.metadata.id:
        raise PublishError(
            f"the report is of {report.id}, and the source builds {kernel.metadata.id}: check the source as it is now"
        )
    if not report.ok:
        failed = [outcome for outcome in report.outcomes if outcome.status == "failed"]
        first = next(each for outcome in failed for each in outcome.findings if each.level == "error")
        raise PublishError(
            f"{kernel.repo_id} is not published: its check fails ({', '.join(outcome.check for outcome in failed)}), "
            f"first with: {first}; see tpu-kernels check {source}"
        )
    kernel = dataclasses.replace(
        kernel, files={**kernel.files, CARD_FILE: fill_card(kernel.files[CARD_FILE], report)}
    )
    publication = _compared(kernel, former, to, report)
    if dry_run or publication.kind == "unchanged":
        return publication
    target.put(kernel, former)
    return dataclasses.replace(publication, done=True)


def yank(repo_id: str, version: int, to: str, *, dry_run: bool = True) -> None:
    """Takes a published version back: it is found no more, and its files stay for those who have locked it.

    Args:
        repo_id: The kernel.
        version: Its version.
        to: Where it was published, as in `publish`.
        dry_run: Only look whether it is there.

    Raises:
        KernelNotFoundError: It is not published there.
        PublishError, SourceUnavailableError, CopyError: The place cannot be read or written.
    """
    target = parse_target(to)
    repo_id = target.repo_id(repo_id)
    if target.published(repo_id, version) is None:
        raise KernelNotFoundError(f"{to} has no {repo_id} v{version}; there is nothing to take back")
    if not dry_run:
        target.withdraw(repo_id, version)


def _check_promises(kernel: BuiltKernel, former: Mapping[str, bytes]) -> None:
    """Refuses a kernel that does not keep what its version has promised."""
    metadata = f"{_PREFIX}{METADATA_FILE}"
    if metadata not in former:
        return
    published = parse_json(Metadata, former[metadata], f"{kernel.repo_id} v{kernel.metadata.version}")
    broken = broken_promises(
        read_interface(_variant(former), published), read_interface(_variant(kernel.files), kernel.metadata)
    )
    if broken:
        raise PublishError(
            f"{kernel.repo_id} v{kernel.metadata.version} is published with another interface: {'; '.join(broken)}; "
            f"set general.version to {kernel.metadata.version + 1} in build.toml, or keep to the interface"
        )


def _variant(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {
        path.removeprefix(_PREFIX): content for path, content in files.items() if path.startswith(_PREFIX)
    }


def _compared(
    kernel: BuiltKernel, former: Mapping[str, bytes] | None, to: str, report: Report
) -> Publication:
    there = former or {}
    added = tuple(path for path in kernel.files if path not in there)
    removed = tuple(path for path in there if path not in kernel.files and not path.startswith("."))
    changed = tuple(path for path, content in kernel.files.items() if there.get(path, content) != content)
    kind: Kind = "new version" if former is None else "new revision"
    # The metadata alone may name another commit of the same source.
    if former is not None and not added and not removed and set(changed) <= {f"{_PREFIX}{METADATA_FILE}"}:
        published = parse_json(Metadata, there[f"{_PREFIX}{METADATA_FILE}"], to)
        kind = "unchanged" if published == kernel.metadata else kind
    return Publication(
        kernel.repo_id,
        kernel.metadata.version,
        to,
        kind,
        kernel.metadata.id,
        added,
        changed,
        removed,
        False,
        report,
    )


def _provenance(source: Path) -> dict[str, Any]:
    """What built a kernel, and from which commit of its source, in the form of stock `kernels`."""
    provenance: dict[str, Any] = {"kernel-builder": {"version": __version__}}
    commit, status = _git(source, "rev-parse", "HEAD"), _git(source, "status", "--porcelain", "--", ".")
    if commit and status is not None:
        provenance["kernel"] = {"commit": commit, "dirty": bool(status)}
    return provenance


def _git(source: Path, *command: str) -> str | None:
    """What git says of the folder; None where it is in no work tree, or there is no git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(source), *command], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
