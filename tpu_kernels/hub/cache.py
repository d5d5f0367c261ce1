"""The cache of the Hub: what was fetched, in the layout of huggingface_hub, with what that leaves out.

::

    <cache>/kernels--org--name/
      refs/v1                    the commit of a version; stock `kernels` never writes it
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
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..log import get_logger
from .layout import METADATA_FILE, VARIANT, git_id

COMMIT = re.compile(r"[0-9a-f]{40}")

_RECEIPT_FILE = "publisher.json"


@dataclass(frozen=True)
class HubCache:
    """The cache in the folder `root`."""

    root: Path

    def snapshot(self, repo_id: str, commit: str) -> Path:
        """The folder of a commit, whether it is there or not."""
        return self._repository(repo_id) / "snapshots" / commit

    def has(self, repo_id: str, commit: str) -> bool:
        """Whether a build of the commit was fetched; it may be incomplete."""
        return (self.snapshot(repo_id, commit) / "build" / VARIANT / METADATA_FILE).exists()

    def drop_damaged(self, folder: Path, git_ids: Mapping[str, str]) -> list[str]:
        """Removes the files of a folder that are not the ones of the commit; returns their names."""
        damaged = []
        for name, expected in sorted(git_ids.items()):
            path = folder / name
            # What cannot be read or removed is left to the verification.
            with contextlib.suppress(OSError):
                if git_id(path.read_bytes(), expected) != expected:
                    blob = path.resolve()
                    path.unlink()
                    if blob.is_relative_to(self.root.resolve()):
                        blob.unlink(missing_ok=True)
                    damaged.append(name)
        return damaged

    def refs(self, repo_id: str) -> dict[str, str]:
        """The branches and tags of builds that were fetched, with the commit of each."""
        folder = self._repository(repo_id) / "refs"
        refs = {}
        # The folder may vanish meanwhile, pruned by another process.
        with contextlib.suppress(FileNotFoundError):
            for path in folder.rglob("*"):
                # A ref may vanish or be replaced by another process meanwhile.
                with contextlib.suppress(OSError, UnicodeDecodeError):
                    commit = path.read_text().strip()
                    if COMMIT.fullmatch(commit) and self.has(repo_id, commit):
                        refs[path.relative_to(folder).as_posix()] = commit
        return refs

    def write_ref(self, repo_id: str, ref: str, commit: str) -> None:
        """Remembers the commit of a ref whose build is here in full."""
        path = self._repository(repo_id) / "refs" / ref
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if path.read_text() == commit:
                return
        self._write(repo_id, path, commit)

    def knows_publisher(self, repo_id: str, endpoint: str) -> bool:
        """Whether the Hub at `endpoint` called the publisher trusted when the kernel was fetched."""
        path = self._repository(repo_id) / _RECEIPT_FILE
        try:
            receipt = json.loads(path.read_bytes())
        except (OSError, ValueError):
            return False
        return bool(receipt == {"endpoint": endpoint, "trusted": True})

    def remember_publisher(self, repo_id: str, endpoint: str) -> None:
        """Writes that the Hub at `endpoint` called the publisher trusted."""
        path = self._repository(repo_id) / _RECEIPT_FILE
        self._write(repo_id, path, json.dumps({"endpoint": endpoint, "trusted": True}))

    def _repository(self, repo_id: str) -> Path:
        return self.root / "--".join(["kernels", *repo_id.split("/")])

    def _write(self, repo_id: str, path: Path, content: str) -> None:
        temporary = self._repository(repo_id) / f".{path.name}.{secrets.token_hex(8)}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_text(content)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            # A cache may be shared and read-only: then it serves what it holds.
            get_logger().info("%s was not written: %s", path, error)
