"""How a built kernel lies on disk, and how its files are named, listed and digested.

The layout is the one of the Hub, so that builds travel between this library and stock `kernels`::

    <repository>/
      README.md                  the kernel card
      build/torch-tpu/           the variant folder: one build; this library writes this one
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
LOCK_FILE = "kernels.lock"

# What is larger is no kernel but a mistake or an attack; it is refused before it fills the memory.
LARGEST_DOCUMENT = 16 * 2**20
LARGEST_BUILD = 2**30
MOST_FILES = 10_000

_LARGE_FILE_ID_LENGTH = 64


def check_relative_path(path: str) -> str:
    """Returns `path` if it is a plain relative POSIX path; raises ValueError if it could leave its folder.

    Example:
        >>> check_relative_path("tpu_ops/__init__.py")
        'tpu_ops/__init__.py'
    """
    # A colon is refused because "C:x" is absolute on Windows, a backslash because it separates there. Half of a
    # surrogate pair is no name of a file.
    if (
        any(part in ("", ".", "..") for part in path.split("/"))
        or any(c in path for c in "\\:\0")
        or any("\ud800" <= c <= "\udfff" for c in path)
    ):
        raise ValueError(f"{path!r} is no plain relative path (such as 'tpu_ops/__init__.py')")
    return path


def read_document(path: Path) -> bytes:
    """The content of a JSON document, cut off just past `LARGEST_DOCUMENT`, where parsing refuses it.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        return file.read(LARGEST_DOCUMENT + 1)


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
    folder, a link to a regular file in there is taken for the file. Also for more or larger files than a
    kernel has. `__pycache__` folders are left out: Python and pip write them beside installed files, and
    this library never runs anything from them.
    """
    files: dict[str, Path] = {}
    size = 0
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
                    size += entry.stat().st_size
                    if excess := excessive(len(files), size):
                        raise error(f"{folder} holds {excess}")
                else:
                    raise error(f"{path} is no regular file; a kernel holds regular files only")
    return dict(sorted(files.items()))


def excessive(files: int, size: int) -> str | None:
    """What of so many files of so many bytes in all is more than a kernel may have, None if it may.

    Example:
        >>> excessive(2, 2**40)
        '1099511627776 bytes, more than the 1073741824 that a kernel may have'
    """
    if files > MOST_FILES:
        return f"{files} files, more than the {MOST_FILES} that a kernel may have"
    if size > LARGEST_BUILD:
        return f"{size} bytes, more than the {LARGEST_BUILD} that a kernel may have"
    return None


def _leads_into(link: Path, folder: Path | None) -> bool:
    target = link.resolve()
    return folder is not None and target.is_file() and target.is_relative_to(folder.resolve())
