"""How a built kernel lies on disk, and how its files are named, listed and digested.

The layout is the one of the Hub, so that builds travel between this library and stock `kernels`::

    <repository>/
      README.md                  the kernel card
      build/torch-tpu/           the variant folder
        metadata.json            name, id, version, requirements, digests of every other file
        __init__.py ...          the kernel's package
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import TpuKernelsError

VARIANT = "torch-tpu"
METADATA_FILE = "metadata.json"
SIGNATURE_FILE = "metadata.json.sigstore"
CARD_FILE = "README.md"

_LARGE_FILE_ID_LENGTH = 64


def check_relative_path(path: str) -> str:
    """Returns `path` if it is a plain relative POSIX path; raises ValueError if it could leave its folder.

    Example:
        >>> check_relative_path("tpu_ops/__init__.py")
        'tpu_ops/__init__.py'
    """
    # A colon is refused because "C:x" is absolute on Windows, a backslash because it separates there.
    if any(part in ("", ".", "..") for part in path.split("/")) or any(c in path for c in "\\:\0"):
        raise ValueError(f"{path!r} is no plain relative path (such as 'tpu_ops/__init__.py')")
    return path


def digest(content: bytes, algorithm: str) -> str:
    """The digest of `content` in the form `metadata.json` holds: base64 of the hash.

    Example:
        >>> digest(b"hello world", "sha256")
        'uU0nuZNNPgilLlLX2n2r+sSE7+N6U4DukIj3rOLvzek='
    """
    return base64.b64encode(hashlib.new(algorithm, content).digest()).decode("ascii")


def dump_json(data: Mapping[str, Any]) -> bytes:
    """`data` as JSON, the one way it is written here."""
    return (json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def listing_digest(listing: Mapping[str, str]) -> str:
    """One SHA-256 (hex) for a folder, from the SHA-256 (hex) of each of its files.

    Example:
        >>> listing_digest({"__init__.py": "0" * 64})[:12]
        '3e6fdb221155'
    """
    return hashlib.sha256(dump_json(listing)).hexdigest()


def git_id(content: bytes, like: str) -> str:
    """The name of `content` in a commit, of the kind that `like` is: git's own, or that of a large file.

    Example:
        >>> git_id(b"hello world", "0" * 40)
        '95d09f2b10159347eece71399a7e2e907ea3df4f'
    """
    if len(like) == _LARGE_FILE_ID_LENGTH:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def list_files(
    folder: Path, error: type[TpuKernelsError], *, links_into: Path | None = None
) -> dict[str, Path]:
    """Every regular file below `folder` by its relative POSIX path, in sorted order.

    Raises `error` for a symbolic link or a special file, whatever it points to; where `links_into` is a
    folder, a link to a regular file in there is taken for the file. `__pycache__` folders are left out:
    Python and pip write them beside installed files, and this library never runs anything from them.
    """
    files: dict[str, Path] = {}
    pending = [folder]
    while pending:
        current = pending.pop()
        with os.scandir(current) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_symlink() and not _leads_into(path, links_into):
                    raise error(f"{path} is a symbolic link; a kernel holds regular files only")
                if entry.is_dir():
                    if entry.name != "__pycache__":
                        pending.append(path)
                elif entry.is_file():
                    files[path.relative_to(folder).as_posix()] = path
                else:
                    raise error(f"{path} is no regular file; a kernel holds regular files only")
    return dict(sorted(files.items()))


def _leads_into(link: Path, folder: Path | None) -> bool:
    target = link.resolve()
    return folder is not None and target.is_file() and target.is_relative_to(folder.resolve())
