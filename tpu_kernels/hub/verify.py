"""Verification: the files of a build are the ones its digests promise, before anything of them runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import VerificationError
from .layout import METADATA_FILE, SIGNATURE_FILE, digest, list_files
from .metadata import Metadata
from .resolve import ResolvedBuild

_UNDIGESTED = (METADATA_FILE, SIGNATURE_FILE)


@dataclass(frozen=True, eq=False)
class VerifiedBuild:
    """A build whose files were checked, with its Python sources as they were when checked.

    The sources are kept so that what is imported is what was verified, whatever happens to the files later.
    """

    resolved: ResolvedBuild
    sources: Mapping[str, bytes]


def verify(build: ResolvedBuild) -> VerifiedBuild:
    """Reads every file of `build` once and checks it.

    Raises:
        VerificationError: A file is missing, changed, not listed, or no regular file; nothing was run.
    """
    contents = verify_files(build.path, build.metadata, digests_required=build.digests_required)
    sources = {path: content for path, content in contents.items() if path.endswith(".py")}
    if "__init__.py" not in sources:
        raise VerificationError(f"{build.path} has no __init__.py; it is no complete kernel build")
    return VerifiedBuild(build, sources)


def verify_files(folder: Path, metadata: Metadata, *, digests_required: bool = True) -> dict[str, bytes]:
    """The files of the variant folder `folder`, checked against the digests of `metadata`.

    Raises:
        VerificationError: They differ, or there are no digests and they are required.
    """
    try:
        contents = {
            path: file.read_bytes()
            for path, file in list_files(folder, VerificationError).items()
            if path not in _UNDIGESTED
        }
    except OSError as error:
        raise VerificationError(f"the kernel in {folder} cannot be read: {error}") from error
    if metadata.digest is not None:
        _compare(folder, contents, metadata.digest.algorithm, metadata.digest.files)
    elif digests_required:
        raise VerificationError(f"{folder / METADATA_FILE} lists no digests to verify the kernel by")
    return contents


def _compare(
    folder: Path, contents: Mapping[str, bytes], algorithm: str, expected: Mapping[str, str]
) -> None:
    missing = [f"missing: {path}" for path in sorted(expected.keys() - contents.keys())]
    unlisted = [f"not listed: {path}" for path in sorted(contents.keys() - expected.keys())]
    changed = [
        f"changed: {path}"
        for path in sorted(expected.keys() & contents.keys())
        if digest(contents[path], algorithm) != expected[path]
    ]
    if violations := [*missing, *changed, *unlisted]:
        raise VerificationError(
            f"the files in {folder} are not the ones its {METADATA_FILE} lists:\n  "
            + "\n  ".join(violations)
            + "\nnothing of the kernel was run; install or build it again"
        )
