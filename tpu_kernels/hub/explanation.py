"""What a resolution says: the build that was chosen, or the error, and every decision on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import TpuKernelsError
from .metadata import Metadata
from .reference import Reference
from .sources import Files


@dataclass(frozen=True, eq=False)
class ResolvedBuild:
    """The build that was chosen. Its metadata is read; its other files are neither here nor verified yet.

    `repo_id` is None for a build that was named by its folder. `address` is that of its variant folder, and
    `fetch` brings the folder to this machine. `revision` is the commit or the version branch it comes from,
    `source` what the source is called. `dependencies` are the kernels it loads, by repository.
    """

    repo_id: str | None
    address: str
    metadata: Metadata
    fetch: Callable[[], Files]
    revision: str = ""
    source: str = ""
    dependencies: Mapping[str, ResolvedBuild] = field(default_factory=dict)

    def tree(self) -> list[ResolvedBuild]:
        """The build and those it depends on, each after those that it depends on itself."""
        builds: dict[int, ResolvedBuild] = {}
        for dependency in self.dependencies.values():
            builds.update((id(build), build) for build in dependency.tree())
        return [*builds.values(), self]


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
            >>> Explanation(Reference("a/b", 1), (), TpuKernelsError("there is none")).as_dict()["error"]
            {'kind': 'TpuKernelsError', 'message': 'there is none'}
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
