"""The index of a mirror: where a build goes, and how it becomes visible."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import CopyError, KernelNotFoundError
from ..layout import METADATA_FILE, dump_json
from ..metadata import Index, parse_json, parse_object
from ..sources import INDEX_FILE
from ..storage import Storage

_ATTEMPTS = 5  # at writing an index that others write to


@dataclass(frozen=True)
class Additions:
    """What comes into the index: entries by repository and version, and other names of repositories."""

    entries: dict[tuple[str, int], Mapping[str, Any]]
    aliases: dict[str, str]

    def add(self, name: str, repo_id: str, version: int, entry: Mapping[str, Any]) -> None:
        """Adds a build that was asked for by `name`."""
        self.entries[repo_id, version] = entry
        if name != repo_id:
            self.aliases[name] = repo_id


def read_index(storage: Storage) -> Index:
    """The index, an empty one where there is none yet.

    Raises:
        InvalidMetadataError: It is malformed.
        SourceUnavailableError: It cannot be read.
    """
    content = storage.read(INDEX_FILE)
    return Index() if content is None else parse_json(Index, content, _origin(storage))


def promises(
    index: Index, repo_id: str, version: int, listing: Mapping[str, str], *, metadata_only: bool = False
) -> bool:
    """Whether the index promises the build with these files, of which it may be enough to know one."""
    entry = index.kernels.get(repo_id, {}).get(str(version))
    if entry is None or entry.metadata_sha256 != listing[METADATA_FILE]:
        return False
    return metadata_only or entry.files is None or entry.files == listing


def place(index: Index, repo_id: str, version: int, digest: str, *, indexed: bool) -> str:
    """The folder for a build: where it is, else `vN`, else beside the build that has that place.

    The builds that the index promises are never overwritten: whoever reads the mirror meanwhile, or after
    a mirror was killed, finds what was promised.
    """
    if indexed:
        return index.kernels[repo_id][str(version)].path
    plain = f"{repo_id}/v{version}"
    taken = {entry.path for entries in index.kernels.values() for entry in entries.values()}
    return f"{plain}-{digest[:12]}" if plain in taken else plain


def publish(storage: Storage, additions: Additions) -> None:
    """Adds to the index. What is in it from others stays.

    Raises:
        CopyError: It cannot be written, or others keep changing it.
    """
    for _ in range(_ATTEMPTS):
        content = storage.read(INDEX_FILE)
        merged = _merge(content, additions, _origin(storage))
        if content == merged:
            return
        storage.write(INDEX_FILE, merged)
    raise CopyError(f"others keep changing the index of {storage.url}; run the command again later")


def withdraw(storage: Storage, repo_id: str, version: int) -> None:
    """Takes a version out of the index. Its files stay, for those who have its address.

    Raises:
        KernelNotFoundError: It is not in it.
        CopyError: The index cannot be written.
    """
    content = storage.read(INDEX_FILE)
    index: dict[str, Any] = json.loads(content) if content is not None else {}
    if str(version) not in read_index(storage).kernels.get(repo_id, {}):
        raise KernelNotFoundError(f"{storage.url} has no {repo_id} v{version}")
    versions = index["kernels"][repo_id]
    del versions[str(version)]
    if not versions:
        del index["kernels"][repo_id]
        index["aliases"] = {name: to for name, to in index.get("aliases", {}).items() if to != repo_id}
    storage.write(INDEX_FILE, dump_json(index))


def _merge(content: bytes | None, additions: Additions, origin: str) -> bytes:
    if content is not None:
        parse_json(Index, content, origin)
    # As plain data: of what a newer release may have put there, the model would keep nothing.
    index: dict[str, Any] = json.loads(content) if content is not None else {}
    kernels, aliases = index.setdefault("kernels", {}), index.setdefault("aliases", {})
    for (repo_id, version), entry in additions.entries.items():
        kernels.setdefault(repo_id, {})[str(version)] = entry
    aliases.update({name: repo_id for name, repo_id in additions.aliases.items() if name not in kernels})
    parse_object(Index, index, origin)
    return dump_json(index)


def _origin(storage: Storage) -> str:
    return f"{storage.url}/{INDEX_FILE}"
