"""Resolution: from a reference to the one build to load, with every decision on the way recorded."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import (
    IncompatibleKernelError,
    InvalidMetadataError,
    KernelNotFoundError,
    SourceUnavailableError,
    TpuKernelsError,
)
from .layout import METADATA_FILE
from .metadata import Metadata, parse_json
from .reference import Reference
from .requirements import unmet_requirements
from .sources import Candidate, Files, Source, local_variant, read_metadata_file


@dataclass(frozen=True, eq=False)
class ResolvedBuild:
    """The build that was chosen. Its metadata is read; its other files are neither here nor verified yet.

    `repo_id` is None for a build that was named by its folder. `address` is that of its variant folder, and
    `fetch` brings the folder to this machine.
    """

    repo_id: str | None
    address: str
    metadata: Metadata
    fetch: Callable[[], Files]


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

    `str()` gives it as text, `as_dict()` as data.
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
            outcome = f"chosen: {self.outcome.address}"
        else:
            outcome = f"{type(self.outcome).__name__}: {self.outcome}"
        return "\n".join([str(self.reference), *(f"  {step}" for step in self.decisions), f"  {outcome}"])

    def as_dict(self) -> dict[str, Any]:
        """The explanation as values that JSON can hold.

        Example:
            >>> Explanation(Reference("a/b", 1), (), KernelNotFoundError("there is none")).as_dict()["error"]
            {'kind': 'KernelNotFoundError', 'message': 'there is none'}
        """
        build, error = None, None
        if isinstance(self.outcome, ResolvedBuild):
            metadata = self.outcome.metadata
            build = {
                "repo-id": self.outcome.repo_id,
                "version": metadata.version,
                "id": metadata.id,
                "address": self.outcome.address,
            }
        else:
            error = {"kind": type(self.outcome).__name__, "message": str(self.outcome)}
        return {
            "reference": {
                "repo-id": self.reference.repo_id,
                "version": self.reference.version,
                "revision": self.reference.revision,
            },
            "decisions": [asdict(decision) for decision in self.decisions],
            "build": build,
            "error": error,
        }


def resolve(reference: Reference, sources: Sequence[Source]) -> Explanation:
    """Finds the build for `reference`: the newest that runs here, of the first source that has one.

    It does not raise: the explanation holds the error. A build whose metadata is broken or tampered with
    ends the search, for an older build in its place would hide that; so does one that is not trusted. A
    source that cannot be reached is passed over: that is what the sources after it are for.
    """
    decisions: list[Decision] = []
    incompatible: list[IncompatibleKernelError] = []
    unavailable: list[SourceUnavailableError] = []
    asked: list[Source] = []
    for source in sources:
        try:
            candidates = source.find(reference)
            if not candidates:
                decisions.append(Decision(source.name, reference.repo_id, False, "no matching version"))
            for candidate in candidates:
                subject = str(candidate)
                try:
                    build = _inspect(source, candidate)
                except IncompatibleKernelError as error:
                    decisions.append(Decision(source.name, subject, False, str(error)))
                    incompatible.append(error)
                else:
                    decisions.append(Decision(source.name, subject, True, _why(reference, candidate)))
                    return Explanation(reference, tuple(decisions), build)
            asked.append(source)
        except SourceUnavailableError as error:
            decisions.append(Decision(source.name, reference.repo_id, False, str(error)))
            unavailable.append(error)
        except TpuKernelsError as error:
            decisions.append(Decision(source.name, reference.repo_id, False, str(error)))
            return Explanation(reference, tuple(decisions), error)
    failure: TpuKernelsError
    if incompatible:
        failure = incompatible[0]
    elif unavailable:
        failure = SourceUnavailableError("; ".join(map(str, [*unavailable, *_hints(reference, asked)])))
        failure.__cause__ = unavailable[0]
    else:
        failure = _not_found(reference, asked)
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
    return ResolvedBuild(None, str(variant), metadata, lambda: Files(variant, digests_required=False))


def read_build(source: Source, candidate: Candidate) -> ResolvedBuild:
    """The build that a source offers, whether it runs here or not.

    Raises:
        InvalidMetadataError: Its `metadata.json` is malformed, or is that of another version.
        VerificationError: Its `metadata.json` is not the one that the source promises.
        IncompatibleKernelError: It has no build for TPUs.
    """
    origin = f"{candidate} ({source.name}): {METADATA_FILE}"
    metadata = parse_json(Metadata, source.read_metadata(candidate), origin)
    if candidate.version not in (None, metadata.version):
        raise InvalidMetadataError(
            f"{origin}: version: it says {metadata.version} where version {candidate.version} was released"
        )
    return ResolvedBuild(
        candidate.repo_id, candidate.address, metadata, lambda: source.files(candidate, metadata)
    )


def _inspect(source: Source, candidate: Candidate) -> ResolvedBuild:
    build = read_build(source, candidate)
    _check_compatible(str(candidate), build.metadata)
    return build


def _check_compatible(subject: str, metadata: Metadata) -> None:
    if metadata.backend.type != "tpu":
        raise IncompatibleKernelError(
            f"{subject} is built for {metadata.backend.type!r}, not for 'tpu'; "
            "load it with the kernels package"
        )
    if metadata.kernel_depends:
        # Its own loading of them would go past this library's sources, verification and trust.
        others = ", ".join(dependency.repo_id for dependency in metadata.kernel_depends)
        raise IncompatibleKernelError(
            f"{subject} depends on other kernels ({others}), which this release does not resolve; "
            "load it with the kernels package"
        )
    unmet = unmet_requirements(metadata.tpu.requires if metadata.tpu else {})
    if unmet:
        # One command for all of them: installed one by one, they may undo each other.
        command = "pip install " + " ".join(f"'{requirement.requirement}'" for requirement in unmet)
        raise IncompatibleKernelError(f"{subject} {' and '.join(map(str, unmet))}; run: {command}")


def _why(reference: Reference, candidate: Candidate) -> str:
    if reference.revision is not None:
        reason = "the revision asked for"
    else:
        reason = "the version asked for" if reference.pinned else "the newest version that runs here"
    if candidate.reason:
        reason = f"{reason}; {candidate.reason}" if candidate.version is not None else candidate.reason
    if candidate.repo_id != reference.repo_id:
        reason += f"; {reference.repo_id} is another name for {candidate.repo_id}"
    return reason


def _not_found(reference: Reference, sources: Sequence[Source]) -> KernelNotFoundError:
    looked = ", ".join(source.name for source in sources)
    versions = _versions(reference, sources)
    subject = str(reference) if versions else f"kernel {reference.repo_id!r}"
    hints = _hints(reference, sources) or ["there is: none"]
    return KernelNotFoundError(f"there is no {subject} (looked in: {looked}); {hints[0]}")


def _hints(reference: Reference, sources: Sequence[Source]) -> list[str]:
    """What the sources have instead, as at most one phrase."""
    if versions := _versions(reference, sources):
        return [f"there is version {', '.join(map(str, versions))}: use version={versions[-1]}"]
    known = sorted({repo_id for source in sources for repo_id in source.repo_ids()})
    name = reference.repo_id.partition("/")[2]
    close = [repo_id for repo_id in known if repo_id.partition("/")[2] == name]
    close = close or difflib.get_close_matches(reference.repo_id, known)
    if close:
        return [f"did you mean {' or '.join(close)}?"]
    return [f"there is: {', '.join(known)}"] if known else []


def _versions(reference: Reference, sources: Sequence[Source]) -> list[int]:
    return sorted({version for source in sources for version in source.versions(reference.repo_id)})
