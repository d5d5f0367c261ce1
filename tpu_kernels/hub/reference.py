"""References: which kernel is meant, and in which version."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import InvalidReferenceError

# The Hub's own rules for repository names; none of them lets a name leave the folder it is joined to.
_REPO_ID = re.compile(r"[A-Za-z0-9_]+(?:[-.][A-Za-z0-9_]+)*/[A-Za-z0-9_]+(?:[-.][A-Za-z0-9_]+)*")
_REPO_ID_LENGTH = 96
_VERSION = re.compile(r"[0-9]{1,9}")
_REVISION = re.compile(r"[A-Za-z0-9_]+(?:(?:-+|[.+/])[A-Za-z0-9_]+)*")


def is_repo_id(value: object) -> bool:
    """Whether `value` has the form `org/name`.

    Example:
        >>> is_repo_id("tpu-kernels/ragged-dot"), is_repo_id("ragged-dot")
        (True, False)
    """
    return isinstance(value, str) and len(value) <= _REPO_ID_LENGTH and bool(_REPO_ID.fullmatch(value))


def check_repo_id(repo_id: str) -> str:
    """Returns `repo_id` if it has the form `org/name`.

    Raises:
        InvalidReferenceError: It has another form.

    Example:
        >>> check_repo_id("tpu-kernels/ragged-dot")
        'tpu-kernels/ragged-dot'
    """
    if not is_repo_id(repo_id):
        raise InvalidReferenceError(
            f"{repo_id!r} names no kernel: write 'org/name', such as 'tpu-kernels/ragged-dot', in letters, "
            f"digits and '_' with single '-' or '.' between them, at most {_REPO_ID_LENGTH} characters"
        )
    return repo_id


@dataclass(frozen=True)
class Reference:
    """A kernel repository and at most one of a version or a revision; neither means the newest version.

    Raises:
        InvalidReferenceError: The repository, version or revision is malformed, or both of the last two
            are given.

    Example:
        >>> print(Reference("tpu-kernels/ragged-dot", version=1))
        tpu-kernels/ragged-dot, version 1
    """

    repo_id: str
    version: int | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        check_repo_id(self.repo_id)
        if self.version is not None and self.revision is not None:
            raise InvalidReferenceError(
                f"{self.repo_id}: both version={self.version!r} and revision={self.revision!r} are given; "
                "give one of them"
            )
        if self.version is not None:
            _check_version(self.repo_id, self.version)
        if self.revision is not None:
            _check_revision(self.repo_id, self.revision)

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Reads `org/name`, `org/name@3` (a version) or `org/name@main` (a revision).

        Raises:
            InvalidReferenceError: `text` is none of these.

        Example:
            >>> Reference.parse("tpu-kernels/ragged-dot@1")
            Reference(repo_id='tpu-kernels/ragged-dot', version=1, revision=None)
        """
        repo_id, separator, pin = text.partition("@")
        if not separator:
            return cls(repo_id)
        return cls(repo_id, version=int(pin)) if _VERSION.fullmatch(pin) else cls(repo_id, revision=pin)

    @property
    def pinned(self) -> bool:
        """Whether a version or a revision was asked for."""
        return self.version is not None or self.revision is not None

    def __str__(self) -> str:
        if self.version is not None:
            return f"{self.repo_id}, version {self.version}"
        if self.revision is not None:
            return f"{self.repo_id}, revision {self.revision!r}"
        return f"{self.repo_id}, newest version"


def _check_version(repo_id: str, version: object) -> None:
    # bool is an int to isinstance, but version=True is a mistake.
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise InvalidReferenceError(
            f"{repo_id}: version={version!r} is no kernel version; versions are whole numbers from 1, "
            "such as version=1"
        )


def _check_revision(repo_id: str, revision: object) -> None:
    if not isinstance(revision, str) or not _REVISION.fullmatch(revision):
        raise InvalidReferenceError(
            f"{repo_id}: revision={revision!r} is no branch, tag or commit; write it as on the Hub, "
            "such as revision='main'"
        )
