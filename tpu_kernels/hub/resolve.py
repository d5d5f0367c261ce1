"""Resolution: from a reference to the one build to load, and those it depends on, with every decision recorded."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import (
    IncompatibleKernelError,
    InvalidMetadataError,
    KernelNotFoundError,
    SourceUnavailableError,
    TpuKernelsError,
)
from .compatibility import check_compatible
from .explanation import Decision, Explanation, ResolvedBuild
from .layout import METADATA_FILE
from .metadata import Metadata, parse_json
from .reference import Reference
from .sources import Candidate, Files, Source, local_builds, local_variants, read_metadata_file
from .variants import is_for_tpu, judge

_DEEPEST = 20


def resolve(reference: Reference, sources: Sequence[Source], *, check_arch: bool = True) -> Explanation:
    """Finds the build for `reference`: the newest that runs here, of the first source that has one.

    It does not raise: the explanation holds the error. A build whose metadata is broken or tampered with
    ends the search, for an older build in its place would hide that; so does one that is not trusted. A
    source that cannot be reached is passed over: that is what the sources after it are for.
    """
    resolver = _Resolver(sources, check_arch)
    outcome: ResolvedBuild | TpuKernelsError
    try:
        outcome = resolver.find(reference)
    except TpuKernelsError as error:
        outcome = error
    return Explanation(reference, tuple(resolver.decisions), outcome)


def resolve_local(path: Path, sources: Sequence[Source]) -> ResolvedBuild:
    """The best build at `path`: a kernel repository, its `build` folder, or the folder of a build.

    What it depends on comes from `sources`.

    Raises:
        KernelNotFoundError: There is no build.
        InvalidMetadataError: Its `metadata.json` is malformed.
        IncompatibleKernelError: It does not run with what is installed.
        VerificationError: Its `metadata.json` is no regular file.
    """
    folder = local_builds(path)[0]
    if (names := local_variants(path)) is not None:
        best = judge(names)[0]
        if best.refusal:
            raise IncompatibleKernelError(_no_build(f"the kernel in {path}", names))
        folder = folder.parent / best.name
    metadata = parse_json(Metadata, read_metadata_file(folder), str(folder / METADATA_FILE))
    subject = f"the kernel in {folder}"
    check_compatible(subject, folder.name, metadata)
    dependencies = _Resolver(sources, True).dependencies(subject, metadata, ())
    return ResolvedBuild(
        None, str(folder), metadata, lambda: Files(folder, digests_required=False), dependencies=dependencies
    )


def read_build(source: Source, candidate: Candidate) -> ResolvedBuild:
    """The build that a source offers, whether it runs here or not, without what it depends on.

    It is the one that is written in Python and for TPUs, as compiled ones are for one kind of machine only.

    Raises:
        InvalidMetadataError: Its `metadata.json` is malformed, or is that of another version.
        VerificationError: Its `metadata.json` is not the one that the source promises.
        IncompatibleKernelError: There is no such build.
    """
    names = source.variants(candidate)
    if names is not None and candidate.variant not in names:
        raise IncompatibleKernelError(
            f"{candidate} has no build for TPUs in Python ({candidate.variant}); it has builds for: "
            f"{', '.join(names) or 'nothing'}"
        )
    return _build(source, candidate, _read_metadata(source, candidate))


class _Resolver:
    """One resolution, with its decisions so far."""

    def __init__(self, sources: Sequence[Source], check_arch: bool) -> None:
        self.decisions: list[Decision] = []
        self._sources = sources
        self._check_arch = check_arch
        self._found: dict[Reference, ResolvedBuild] = {}

    def find(self, reference: Reference, dependants: tuple[str, ...] = ()) -> ResolvedBuild:
        """The build for a reference; `dependants` are the kernels that led to it, the first one first."""
        if reference not in self._found:
            self._found[reference] = self._search(reference, dependants)
        return self._found[reference]

    def dependencies(
        self, subject: str, metadata: Metadata, dependants: tuple[str, ...]
    ) -> dict[str, ResolvedBuild]:
        """The builds that `subject` depends on, by repository."""
        dependants = (*dependants, subject)
        found = {}
        for dependency in metadata.kernel_depends:
            try:
                found[dependency.repo_id] = self.find(dependency.reference, dependants)
            except (KernelNotFoundError, IncompatibleKernelError) as error:
                raise IncompatibleKernelError(
                    f"{subject} depends on {dependency.repo_id}: {error}"
                ) from error
            except TpuKernelsError as error:
                raise type(error)(f"{error} ({subject} depends on it)") from error
        return found

    def _search(self, reference: Reference, dependants: tuple[str, ...]) -> ResolvedBuild:
        incompatible: list[IncompatibleKernelError] = []
        unavailable: list[SourceUnavailableError] = []
        asked: list[Source] = []
        for source in self._sources:
            try:
                candidates = source.find(reference)
                if not candidates:
                    self._reject(source, reference.repo_id, "no matching version")
                for candidate in candidates:
                    try:
                        return self._choose(reference, source, candidate, dependants)
                    except IncompatibleKernelError as error:
                        if source.binding:
                            raise
                        incompatible.append(error)
                asked.append(source)
            except SourceUnavailableError as error:
                self._reject(source, reference.repo_id, str(error))
                if source.binding:
                    raise
                unavailable.append(error)
            except IncompatibleKernelError:
                raise
            except TpuKernelsError as error:
                self._reject(source, reference.repo_id, str(error))
                raise
        if incompatible:
            raise incompatible[0]
        if unavailable:
            message = "; ".join(map(str, [*unavailable, *_hints(reference, asked)]))
            raise SourceUnavailableError(message) from unavailable[0]
        raise _not_found(reference, asked)

    def _choose(
        self, reference: Reference, source: Source, candidate: Candidate, dependants: tuple[str, ...]
    ) -> ResolvedBuild:
        """The best build of a candidate's version that runs here."""
        names = source.variants(candidate)
        if names is None:
            return self._inspect(reference, source, candidate, str(candidate), dependants)
        verdicts = judge(names)
        # Where there is one build only, its name tells nothing.
        subjects = {name: f"{candidate} {name}" if len(names) > 1 else str(candidate) for name in names}
        for verdict in verdicts:
            if verdict.refusal:
                self._reject(source, subjects[verdict.name], verdict.refusal)
        accepted = [verdict.name for verdict in verdicts if not verdict.refusal]
        failures = []
        for place, name in enumerate(accepted):
            try:
                build = self._inspect(
                    reference, source, candidate.of_variant(name), subjects[name], dependants
                )
            except IncompatibleKernelError as error:
                failures.append(error)
                continue
            for other in accepted[place + 1 :]:
                self._reject(source, subjects[other], f"{name} is preferred")
            return build
        if failures:
            raise failures[0]
        message = _no_build(str(candidate), names)
        self._reject(source, str(candidate), message)
        raise IncompatibleKernelError(message)

    def _inspect(
        self,
        reference: Reference,
        source: Source,
        candidate: Candidate,
        subject: str,
        dependants: tuple[str, ...],
    ) -> ResolvedBuild:
        """The build of a candidate, if it runs here, with what it depends on."""
        metadata = _read_metadata(source, candidate)
        try:
            check_compatible(str(candidate), candidate.variant, metadata, check_arch=self._check_arch)
            name = f"{candidate.repo_id} v{metadata.version}"
            if name in dependants:
                cycle = " -> ".join([*dependants[dependants.index(name) :], name])
                raise IncompatibleKernelError(f"the kernels depend on each other: {cycle}")
            if len(dependants) == _DEEPEST:
                raise IncompatibleKernelError(
                    f"{name} is {_DEEPEST} dependencies away from {dependants[0]}, which is more than is followed"
                )
            dependencies = self.dependencies(name, metadata, dependants)
        except IncompatibleKernelError as error:
            self._reject(source, subject, str(error))
            raise
        self.decisions.append(Decision(source.name, subject, True, _why(reference, candidate, dependants)))
        return replace(_build(source, candidate, metadata), dependencies=dependencies)

    def _reject(self, source: Source, subject: str, reason: str) -> None:
        self.decisions.append(Decision(source.name, subject, False, reason))


def _read_metadata(source: Source, candidate: Candidate) -> Metadata:
    origin = f"{candidate} ({source.name}): {METADATA_FILE}"
    metadata = parse_json(Metadata, source.read_metadata(candidate), origin)
    if candidate.version not in (None, metadata.version):
        raise InvalidMetadataError(
            f"{origin}: version: it says {metadata.version} where version {candidate.version} was released"
        )
    return metadata


def _build(source: Source, candidate: Candidate, metadata: Metadata) -> ResolvedBuild:
    return ResolvedBuild(
        candidate.repo_id,
        candidate.address,
        metadata,
        lambda: source.files(candidate, metadata),
        candidate.commit or f"v{metadata.version}",
        source.name,
    )


def _no_build(subject: str, names: Sequence[str]) -> str:
    verdicts = {verdict.name: verdict.refusal for verdict in judge(names)}
    ours = [f"{name}: {refusal}" for name, refusal in verdicts.items() if is_for_tpu(name)]
    if ours:
        return f"{subject} has no build that runs here: {'; '.join(ours)}"
    return f"{subject} has no build for TPUs; it has builds for: {', '.join(verdicts) or 'nothing'}"


def _why(reference: Reference, candidate: Candidate, dependants: tuple[str, ...]) -> str:
    if reference.revision is not None:
        reason = "the revision asked for"
    else:
        reason = "the version asked for" if reference.pinned else "the newest version that runs here"
    if dependants:
        reason = f"a dependency of {dependants[-1]}"
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
