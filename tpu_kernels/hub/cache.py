"""The cache of the Hub: what was fetched, in the layout of huggingface_hub, with what that leaves out.

::

    <cache>/kernels--org--name/
      refs/v1                    the commit of a version, as old as when the Hub last said so; stock
                                 `kernels` never writes it
      snapshots/<commit>/...     links into blobs
      blobs/<id>                 each file once
      trees/<commit>.json        the listing of the commit, with the id of each file
      publisher.json             where the Hub called the organisation a trusted publisher

What is written here is written beside its place and moved there, so that no other process, and no later
one, ever reads half of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import replace_file
from ..log import get_logger
from .layout import METADATA_FILE, check_relative_path, git_id, read_document

COMMIT = re.compile(r"[0-9a-f]{40}")

_RECEIPT_FILE = "publisher.json"
_LISTING_FORMAT = 1


@dataclass(frozen=True)
class Entry:
    """A file in the listing of a commit: the id it has there, and its size in bytes."""

    id: str
    size: int


@dataclass(frozen=True)
class HubCache:
    """The cache in the folder `root`."""

    root: Path

    def snapshot(self, repo_id: str, commit: str) -> Path:
        """The folder of a commit, whether it is there or not."""
        return self._repository(repo_id) / "snapshots" / commit

    def has(self, repo_id: str, commit: str) -> bool:
        """Whether a build of the commit was fetched; it may be incomplete."""
        return bool(self.variants(repo_id, commit))

    def variants(self, repo_id: str, commit: str) -> list[str]:
        """The names of the builds of a commit of which anything was fetched."""
        builds = self.snapshot(repo_id, commit) / "build"
        return sorted(file.parent.name for file in builds.glob(f"*/{METADATA_FILE}"))

    def listing(self, repo_id: str, commit: str) -> dict[str, Entry] | None:
        """The files of a commit by their paths, as huggingface_hub keeps them; None where it keeps nothing."""
        try:
            content = json.loads(read_document(self._listing(repo_id, commit)))
            if content["format_version"] != _LISTING_FORMAT:
                return None
            return {check_relative_path(path): _entry(file) for path, file in content["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def drop_damaged(self, repo_id: str, commit: str, build: str, names: Iterable[str]) -> list[str]:
        """Removes what is damaged of a build, if any of its files `names` is; returns what was removed.

        The listing that says so is removed with it, since it may be what is damaged.
        """
        folder = self.snapshot(repo_id, commit) / "build" / build
        prefix = f"build/{build}/"
        listing = self.listing(repo_id, commit) or {}
        listed = {
            path.removeprefix(prefix): entry for path, entry in listing.items() if path.startswith(prefix)
        }
        if not any(_differs(folder / name, listed.get(name)) for name in names):
            return []
        damaged = []
        for name in sorted(listed):
            path = folder / name
            # What cannot be removed is left to the verification.
            with contextlib.suppress(OSError):
                if _differs(path, listed[name]):
                    blob = path.resolve()
                    path.unlink()
                    if blob.is_relative_to(self.root.resolve()):
                        blob.unlink(missing_ok=True)
                    damaged.append(name)
        self.drop_listing(repo_id, commit)
        return damaged

    def drop_listing(self, repo_id: str, commit: str) -> None:
        """Removes the listing of a commit, so that it is fetched again."""
        with contextlib.suppress(OSError):
            self._listing(repo_id, commit).unlink(missing_ok=True)

    def refs(self, repo_id: str) -> dict[str, str]:
        """The branches and tags of builds that were fetched, with the commit of each."""
        folder = self._repository(repo_id) / "refs"
        refs = {}
        # The folder may vanish meanwhile, pruned by another process.
        with contextlib.suppress(FileNotFoundError):
            for path in folder.rglob("*"):
                # A ref may vanish or be replaced by another process meanwhile.
                with contextlib.suppress(OSError, UnicodeDecodeError):
                    commit = read_document(path).decode().strip()
                    # A name with a dot before it is left by a process that was killed while it wrote.
                    is_ref = COMMIT.fullmatch(commit) and not path.name.startswith(".")
                    if is_ref and self.has(repo_id, commit):
                        refs[path.relative_to(folder).as_posix()] = commit
        return refs

    def fresh_commit(self, repo_id: str, ref: str, seconds: float) -> str | None:
        """The commit of a ref, if the Hub said so no longer ago than `seconds` and a build of it is here."""
        path = self._repository(repo_id) / "refs" / ref
        with contextlib.suppress(OSError, UnicodeDecodeError):
            commit = path.read_text().strip()
            # A time in the future is one of a clock that was wrong.
            is_fresh = 0 <= time.time() - path.stat().st_mtime < seconds
            if is_fresh and COMMIT.fullmatch(commit) and self.has(repo_id, commit):
                return commit
        return None

    def write_ref(self, repo_id: str, ref: str, commit: str) -> None:
        """Remembers the commit of a ref, as the Hub says it now, whose build is here in full."""
        path = self._repository(repo_id) / "refs" / ref
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if path.read_text() == commit:
                os.utime(path)
                return
        self._write(path, commit)

    def knows_publisher(self, repo_id: str, endpoint: str) -> bool:
        """Whether the Hub at `endpoint` called the publisher trusted when the kernel was fetched."""
        path = self._repository(repo_id) / _RECEIPT_FILE
        try:
            receipt = json.loads(read_document(path))
        except (OSError, ValueError, RecursionError):
            return False
        return bool(receipt == {"endpoint": endpoint, "trusted": True})

    def remember_publisher(self, repo_id: str, endpoint: str) -> None:
        """Writes that the Hub at `endpoint` called the publisher trusted."""
        path = self._repository(repo_id) / _RECEIPT_FILE
        self._write(path, json.dumps({"endpoint": endpoint, "trusted": True}))

    def _repository(self, repo_id: str) -> Path:
        return self.root / "--".join(["kernels", *repo_id.split("/")])

    def _listing(self, repo_id: str, commit: str) -> Path:
        return self._repository(repo_id) / "trees" / f"{commit}.json"

    def _write(self, path: Path, content: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content.encode())
        except OSError as error:
            # A cache may be shared and read-only: then it serves what it holds.
            get_logger().info("%s was not written: %s", path, error)


def _differs(path: Path, expected: Entry | None) -> bool:
    """Whether a file is here and is not the one expected."""
    if expected is None:
        return False
    try:
        # The size first: what is absurdly large is not read.
        is_size = path.stat().st_size == expected.size
        return not is_size or git_id(path.read_bytes(), expected.id) != expected.id
    except OSError:
        return False


def _entry(file: dict[str, Any]) -> Entry:
    identity, size = file.get("lfs_sha256") or file["blob_id"], file["size"]
    if not isinstance(identity, str) or not isinstance(size, int):
        raise TypeError(f"{file!r} describes no file")
    return Entry(identity, size)
