"""Verification: the files of a build are the ones its digests promise, before anything of them runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import VerificationError
from .cache import COMMIT
from .explanation import ResolvedBuild
from .layout import METADATA_FILE, SIGNATURE_FILE, digest, git_id, list_files
from .metadata import Metadata
from .signatures import accepted_signers, check_signature
from .sources import Files

_UNDIGESTED = (METADATA_FILE, SIGNATURE_FILE)


@dataclass(frozen=True, eq=False)
class VerifiedBuild:
    """A build whose files were checked, as they were when checked.

    They are kept so that what is imported and read is what was verified, whatever happens on disk later.
    """

    resolved: ResolvedBuild
    path: Path
    contents: Mapping[str, bytes]


def verify(build: ResolvedBuild) -> VerifiedBuild:
    """Fetches the files of `build`, reads every one once and checks it.

    Raises:
        VerificationError: A file is missing, changed, not listed, or no regular file; nothing was run.
        SourceUnavailableError: The files are not here and cannot be fetched.
    """
    files = build.fetch()
    contents = read_verified(files, build.metadata)
    # What comes from a registry is vouched for by whoever made it; signatures are for what the Hub serves.
    if COMMIT.fullmatch(build.revision) and (signers := accepted_signers()):
        check_signature(files.path, signers)
    if "__init__.py" not in contents:
        raise VerificationError(f"{files.path} has no __init__.py; it is no complete kernel build")
    return VerifiedBuild(build, files.path, contents)


def verify_files(folder: Path, metadata: Metadata, *, digests_required: bool = True) -> dict[str, bytes]:
    """The files of the variant folder `folder`, checked against the digests of `metadata`.

    Raises:
        VerificationError: They differ, or there are no digests and they are required.
    """
    return read_verified(Files(folder, digests_required), metadata)


def read_verified(files: Files, metadata: Metadata) -> dict[str, bytes]:
    contents = _read(files)
    if files.git_ids is not None:
        _compare(files, contents, files.git_ids, "commit", git_id)
    digested = {path: content for path, content in contents.items() if path not in _UNDIGESTED}
    if files.locked is not None:
        lister = f"lock {files.locked_by}"
        _compare(files, digested, files.locked, lister, lambda content, _: digest(content, "sha256"))
    if metadata.digest is not None:
        algorithm = metadata.digest.algorithm
        _compare(files, digested, metadata.digest.files, METADATA_FILE, lambda c, _: digest(c, algorithm))
    elif files.digests_required:
        raise VerificationError(f"{files.path / METADATA_FILE} lists no digests to verify the kernel by")
    return digested


def _read(files: Files) -> dict[str, bytes]:
    try:
        listed = list_files(files.path, VerificationError, links_into=files.links_into)
        return {path: file.read_bytes() for path, file in listed.items()}
    except OSError as error:
        raise VerificationError(f"the kernel in {files.path} cannot be read: {error}") from error


def _compare(
    files: Files,
    contents: Mapping[str, bytes],
    expected: Mapping[str, str],
    lister: str,
    identify: Callable[[bytes, str], str],
) -> None:
    missing = [f"missing: {path}" for path in sorted(expected.keys() - contents.keys())]
    unlisted = [f"not listed: {path}" for path in sorted(contents.keys() - expected.keys())]
    changed = [
        f"changed: {path}"
        for path in sorted(expected.keys() & contents.keys())
        if identify(contents[path], expected[path]) != expected[path]
    ]
    if violations := [*missing, *changed, *unlisted]:
        raise VerificationError(
            f"the files in {files.path} are not the ones its {lister} lists:\n  "
            + "\n  ".join(violations)
            + f"\nnothing of the kernel was run; {files.remedy}",
            violations,
        )
