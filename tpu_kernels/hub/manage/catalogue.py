"""What the sources have: kernels, versions, and what is known about one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import SourceUnavailableError, TpuKernelsError, UntrustedKernelError
from ..explanation import Explanation, ResolvedBuild
from ..hub_source import HubSource
from ..layers import Layer, read_layers
from ..metadata import Metadata
from ..reference import Reference
from ..requirements import UnmetRequirement, unmet_requirements
from ..resolve import read_build, resolve
from ..sources import Candidate, IndexedSource, Source
from .inventory import cached_items


@dataclass(frozen=True)
class ListedKernel:
    """A kernel that a source has. `alias_of` is set where the name is another one for a kernel.

    `versions` are the newest first; empty where only the build itself says which version it is.
    """

    source: str
    kernel: str
    versions: tuple[int, ...]
    alias_of: str | None = None


@dataclass(frozen=True)
class ListedVersion:
    """A version that a source has. `commit` is None where the source has none, `taken` marks what would load."""

    source: str
    version: int | None
    commit: str | None
    address: str
    taken: bool


@dataclass(frozen=True)
class SourceFailure:
    """A source that could not be asked, and why."""

    source: str
    error: TpuKernelsError


@dataclass(frozen=True)
class Description:
    """What is known about a build without loading it.

    `unmet` are its requirements that this environment does not meet; `path` is its folder on this machine,
    None where it is not here, `size` the bytes in it, and `layers` what its sources say of its layers.
    `explanation` says whether it would be loaded.
    """

    repo_id: str
    source: str
    address: str
    metadata: Metadata
    card: str | None
    unmet: tuple[UnmetRequirement, ...]
    path: Path | None
    size: int | None
    layers: tuple[Layer, ...] | None
    explanation: Explanation


def list_kernels(sources: Sequence[Source]) -> tuple[list[ListedKernel], list[SourceFailure]]:
    """The kernels of the sources that can be listed. Of a Hub, those in its cache; no request is sent to it."""
    listed: list[ListedKernel] = []
    failures: list[SourceFailure] = []
    for source in sources:
        try:
            listed += _cached_kernels() if isinstance(source, HubSource) else _kernels(source)
        except TpuKernelsError as error:
            failures.append(SourceFailure(source.name, error))
    return listed, failures


def list_versions(repo_id: str, sources: Sequence[Source]) -> tuple[list[ListedVersion], list[SourceFailure]]:
    """The versions of a kernel that each source has, newest first, and which of them would be loaded."""
    reference = Reference(repo_id)
    chosen = resolve(reference, sources).build
    taken_from = chosen.source if chosen is not None else None
    listed: list[ListedVersion] = []
    failures: list[SourceFailure] = []
    for source in sources:
        try:
            listed += [
                ListedVersion(
                    source.name,
                    c.version,
                    c.commit,
                    c.address,
                    source.name == taken_from and _is_of(c, chosen),
                )
                for c in source.find(reference)
            ]
        except UntrustedKernelError as error:
            listed += [ListedVersion(source.name, v, None, "", False) for v in source.versions(repo_id)]
            failures.append(SourceFailure(source.name, error))
        except TpuKernelsError as error:
            failures.append(SourceFailure(source.name, error))
    return listed, failures


def describe(reference: Reference, sources: Sequence[Source]) -> Description:
    """What is known about the build that `reference` would load, or else the newest one that there is.

    Raises:
        TpuKernelsError: There is none, or its metadata cannot be read; the same as `get_kernel` raises.
    """
    explanation = resolve(reference, sources)
    source, candidate, build = _find(reference, sources, explanation)
    metadata = build.metadata
    card = _card(source, candidate)
    path = source.local_path(candidate)
    if path and metadata.digest and not all((path / name).exists() for name in metadata.digest.files):
        path = None  # the Hub's cache may hold the metadata alone
    return Description(
        candidate.repo_id,
        source.name,
        build.address,
        metadata,
        _summary(card.decode(errors="replace")) if card is not None else None,
        tuple(unmet_requirements(metadata.tpu.requires if metadata.tpu else {})),
        path,
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path else None,
        _layers(path) if path else None,
        explanation,
    )


def _kernels(source: Source) -> list[ListedKernel]:
    aliases = source.index.aliases if isinstance(source, IndexedSource) else {}
    return [
        ListedKernel(source.name, repo_id, tuple(source.versions(repo_id)), aliases.get(repo_id))
        for repo_id in source.repo_ids()
    ]


def _cached_kernels() -> list[ListedKernel]:
    versions: dict[str, set[int]] = {}
    for item in cached_items():
        if item.cache == "hub" and item.kernel is not None:
            versions.setdefault(item.kernel, set()).update([item.version] if item.version else [])
    return [
        ListedKernel("hub cache", kernel, tuple(sorted(found, reverse=True)))
        for kernel, found in versions.items()
    ]


def _find(
    reference: Reference, sources: Sequence[Source], explanation: Explanation
) -> tuple[Source, Candidate, ResolvedBuild]:
    """The chosen build with where it is from; where none was chosen, the newest."""
    chosen = explanation.build
    for source in sources:
        try:
            candidates = source.find(reference)
        except SourceUnavailableError:
            continue
        for candidate in candidates:
            if chosen is None:
                return source, candidate, read_build(source, candidate)
            if _is_of(candidate, chosen):
                return source, candidate.of_variant(chosen.address.rpartition("/")[2]), chosen
    explanation.unwrap()
    raise AssertionError("a build was chosen, and no source has it")


def _card(source: Source, candidate: Candidate) -> bytes | None:
    try:
        return source.read_card(candidate)
    except SourceUnavailableError:
        return None


def _layers(path: Path) -> tuple[Layer, ...]:
    files = [path / "layers.py", *(path / "layers").rglob("*.py")]
    return tuple(
        read_layers(
            {file.relative_to(path).as_posix(): file.read_bytes() for file in files if file.is_file()}
        )
    )


def _is_of(candidate: Candidate, build: ResolvedBuild | None) -> bool:
    """Whether `build` is one of the builds of a candidate's version, which differ in the last part."""
    return build is not None and candidate.address.rpartition("/")[0] == build.address.rpartition("/")[0]


def _summary(card: str) -> str:
    """The first paragraph of a kernel card, after its front matter and headings.

    Example:
        >>> _summary("---\\nlicense: mit\\n---\\n# relu\\n\\nClips at\\nzero.\\n\\nMore.")
        'Clips at zero.'
    """
    if card.startswith("---\n"):
        card = card.partition("\n---\n")[2]
    for paragraph in card.split("\n\n"):
        lines = [line for line in paragraph.strip().splitlines() if not line.startswith("#")]
        if lines:
            return " ".join(line.strip() for line in lines)
    return ""
