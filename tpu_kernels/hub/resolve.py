"""Resolution: from a reference to the one build to load, with every decision on the way recorded."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import (
    IncompatibleKernelError,
    InvalidMetadataError,
    KernelNotFoundError,
    TpuKernelsError,
)
from .layout import METADATA_FILE
from .metadata import Metadata, parse_json
from .reference import Reference
from .requirements import unmet_requirements
from .sources import Candidate, Source, local_variant, read_metadata_file


@dataclass(frozen=True, eq=False)
class ResolvedBuild:
    """The build that was chosen. Its metadata is read; its files are not verified yet.

    `repo_id` is None for a build that was named by its folder. `digests_required` says whether a build
    without digests is refused.
    """

    repo_id: str | None
    path: Path
    metadata: Metadata
    digests_required: bool


@dataclass(frozen=True)
class Decision:
    """One step of a resolution: what was looked at, whether it was accepted, and why."""

    source: str
    subject: str
    accepted: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.source}: {self.subject}: {'accepted' if self.accepted else 'rejected'}: {self.reason}"


@dataclass(frozen=True, eq=False)
class Explanation:
    """How a reference was resolved: the decisions in order, then the chosen build or the error.

    `str()` gives it as text.
    """

    reference: Reference
    decisions: tuple[Decision, ...]
    outcome: ResolvedBuild | TpuKernelsError

    @property
    def build(self) -> ResolvedBuild | None:
        """The chosen build, if there is one."""
        return self.outcome if isinstance(self.outcome, ResolvedBuild) else None

    def unwrap(self) -> ResolvedBuild:
        """The chosen build; raises the error if there is none."""
        if isinstance(self.outcome, TpuKernelsError):
            raise self.outcome
        return self.outcome

    def __str__(self) -> str:
        if isinstance(self.outcome, ResolvedBuild):
            outcome = f"chosen: {self.outcome.path}"
        else:
            outcome = f"{type(self.outcome).__name__}: {self.outcome}"
        return "\n".join([str(self.reference), *(f"  {step}" for step in self.decisions), f"  {outcome}"])


def resolve(reference: Reference, sources: Sequence[Source]) -> Explanation:
    """Finds the build for `reference`: the newest that runs here, of the first source that has one.

    It does not raise: the explanation holds the error. A build whose metadata is broken or tampered with
    ends the search, for an older build in its place would hide that.
    """
    decisions: list[Decision] = []
    incompatible: list[IncompatibleKernelError] = []
    for source in sources:
        try:
            candidates = source.find(reference)
            if not candidates:
                decisions.append(Decision(source.name, reference.repo_id, False, "no matching version"))
            for candidate in candidates:
                subject = f"{candidate.repo_id} v{candidate.version}"
                try:
                    build = _inspect(source, candidate)
                except IncompatibleKernelError as error:
                    decisions.append(Decision(source.name, subject, False, str(error)))
                    incompatible.append(error)
                else:
                    decisions.append(Decision(source.name, subject, True, _why(reference, candidate)))
                    return Explanation(reference, tuple(decisions), build)
        except TpuKernelsError as error:
            decisions.append(Decision(source.name, reference.repo_id, False, str(error)))
            return Explanation(reference, tuple(decisions), error)
    failure = incompatible[0] if incompatible else _not_found(reference, sources)
    return Explanation(reference, tuple(decisions), failure)


def resolve_local(path: Path) -> ResolvedBuild:
    """The build at `path`: a kernel repository, its `build` folder, or the variant folder itself.

    Raises:
        KernelNotFoundError: There is no build.
        InvalidMetadataError: Its `metadata.json` is malformed.
        IncompatibleKernelError: It does not run with what is installed.
        VerificationError: Its `metadata.json` is no regular file.
    """
    variant = local_variant(path)
    metadata = parse_json(Metadata, read_metadata_file(variant), str(variant / METADATA_FILE))
    _check_compatible(f"the kernel in {variant}", metadata)
    return ResolvedBuild(None, variant, metadata, digests_required=False)


def _inspect(source: Source, candidate: Candidate) -> ResolvedBuild:
    origin = f"{candidate.repo_id} v{candidate.version} ({source.name}): {METADATA_FILE}"
    metadata = parse_json(Metadata, source.read_metadata(candidate), origin)
    if metadata.version != candidate.version:
        raise InvalidMetadataError(
            f"{origin}: version: it says {metadata.version} where version {candidate.version} was released"
        )
    _check_compatible(f"{candidate.repo_id} v{candidate.version}", metadata)
    return ResolvedBuild(candidate.repo_id, source.fetch(candidate), metadata, digests_required=True)


def _check_compatible(subject: str, metadata: Metadata) -> None:
    if metadata.backend.type != "tpu":
        raise IncompatibleKernelError(
            f"{subject} is built for {metadata.backend.type!r}, not for 'tpu'; "
            "load it with the kernels package"
        )
    unmet = unmet_requirements(metadata.tpu.requires if metadata.tpu else {})
    if unmet:
        # One command for all of them: installed one by one, they may undo each other.
        command = "pip install " + " ".join(f"'{requirement.requirement}'" for requirement in unmet)
        raise IncompatibleKernelError(f"{subject} {' and '.join(map(str, unmet))}; run: {command}")


def _why(reference: Reference, candidate: Candidate) -> str:
    reason = "the version asked for" if reference.pinned else "the newest version that runs here"
    if candidate.repo_id != reference.repo_id:
        reason += f"; {reference.repo_id} is another name for {candidate.repo_id}"
    return reason


def _not_found(reference: Reference, sources: Sequence[Source]) -> KernelNotFoundError:
    looked = ", ".join(source.name for source in sources)
    versions = sorted({version for source in sources for version in source.versions(reference.repo_id)})
    if versions:
        return KernelNotFoundError(
            f"there is no {reference} (looked in: {looked}); there is version "
            f"{', '.join(map(str, versions))}: use version={versions[-1]}"
        )
    known = sorted({repo_id for source in sources for repo_id in source.repo_ids()})
    name = reference.repo_id.partition("/")[2]
    close = [repo_id for repo_id in known if repo_id.partition("/")[2] == name]
    close = close or difflib.get_close_matches(reference.repo_id, known)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there is: {', '.join(known) or 'none'}"
    return KernelNotFoundError(f"there is no kernel {reference.repo_id!r} (looked in: {looked}); {hint}")
