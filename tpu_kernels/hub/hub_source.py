"""The Hub as a source: versions are branches `vN`, and what was fetched once is served by the cache.

What each step costs: a kernel that is not here yet one request for its refs, one for its publisher, and its
files; one that is here, the request for its refs, unless the Hub was asked for them just now; a commit that is
here, nothing; where requests are forbidden or fail, nothing either.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import SourceUnavailableError, VerificationError
from ..log import warn_once
from . import usage
from .cache import COMMIT, Entry, HubCache
from .client import BYTECODE, HubClient
from .layout import CARD_FILE, METADATA_FILE, VARIANT, excessive, read_document
from .metadata import Metadata
from .reference import Reference
from .sources import Candidate, Files, version_of_branch
from .trust import Trust, untrusted
from .variants import TPU_PATTERNS


@dataclass(frozen=True, eq=False)
class _Refs:
    """The branches and tags of a repository; `reached` is False where they are those of the cache."""

    commits: Mapping[str, str]
    reached: bool


class HubSource:
    """The kernels of a Hub, for one call.

    What the Hub says about a repository is asked once; the next call makes a source of its own. Two sources
    are equal when they trust the same and have the same Hub and cache: then one finds what the other would.
    `endpoint` is the address of the Hub and `cache` the folder of the cache, None for those of
    huggingface_hub. A version that the Hub was asked for no longer than `fresh` seconds ago is not asked for
    again. With `local_only` no request is sent.
    """

    binding = False

    def __init__(
        self,
        trust: Trust,
        endpoint: str | None = None,
        cache: str | None = None,
        user_agent: str | None = None,
        *,
        fresh: float = 0,
        local_only: bool = False,
    ) -> None:
        self.trust = trust
        self._endpoint = endpoint
        self._cache_folder = cache
        self._user_agent = user_agent
        self._fresh = fresh
        self._local_only = local_only
        self._asked: dict[str, _Refs] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HubSource) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        return (self.trust, self._endpoint, self._cache_folder, self._local_only)

    @property
    def name(self) -> str:
        return "hub offline" if self._client.offline else "hub"

    @property
    def endpoint(self) -> str:
        """The address of the Hub."""
        return self._client.endpoint

    def repo_ids(self) -> list[str]:
        return []

    def versions(self, repo_id: str) -> list[int]:
        refs = self._refs(repo_id).commits
        found = {version for name in refs if (version := version_of_branch(name)) is not None}
        return sorted(found, reverse=True)

    def find(self, reference: Reference) -> list[Candidate]:
        repo_id = reference.repo_id
        targets = self._targets(reference)
        if not targets:
            return []
        reason = self._why_trusted(repo_id, targets[0][2])
        # Only where the Hub was asked for the version itself: this is not worth a request of its own.
        if reference.version is not None and repo_id in self._asked:
            self._tell_of_newer(repo_id, reference.version)
        if not self._reachable(repo_id):
            reason += "; from the cache"
        return [
            Candidate(repo_id, version, ref, self._address(repo_id, commit), reason, commit=commit)
            for version, ref, commit in targets
        ]

    def variants(self, candidate: Candidate) -> list[str]:
        with usage.shared(usage.repository_lock(self._cache.root, candidate.repo_id)):
            return self._variants(candidate)

    def _variants(self, candidate: Candidate) -> list[str]:
        repo_id, commit = candidate.repo_id, _commit(candidate)
        if self._cache.listing(repo_id, commit) is None:
            if not self._reachable(repo_id):
                if not (here := self._cache.variants(repo_id, commit)):
                    raise SourceUnavailableError(
                        f"{candidate} at the commit {commit} is not in the cache {self._cache.root}, and the Hub "
                        f"({self._client.endpoint}) cannot be asked for it; load it once while it can"
                    )
                return here
            # One request brings the listing, and with it comes the metadata of what may run here.
            metadata = [f"build/{pattern}/{METADATA_FILE}" for pattern in TPU_PATTERNS]
            self._fetch(candidate, metadata)
        listing = self._cache.listing(repo_id, commit)
        if listing is None:
            return self._cache.variants(repo_id, commit)
        builds = [path.split("/") for path in listing if path.startswith("build/")]
        return sorted({parts[1] for parts in builds if len(parts) > 2})

    def read_metadata(self, candidate: Candidate) -> bytes:
        with usage.shared(usage.repository_lock(self._cache.root, candidate.repo_id)):
            return self._read_metadata(candidate)

    def _read_metadata(self, candidate: Candidate) -> bytes:
        repo_id, commit = candidate.repo_id, _commit(candidate)
        self._complete(candidate, [METADATA_FILE])
        path = self._cache.snapshot(repo_id, commit) / "build" / candidate.variant / METADATA_FILE
        if not path.resolve().is_relative_to(self._cache.root.resolve()):
            raise VerificationError(f"{path} leads out of the cache {self._cache.root}; delete it")
        try:
            return read_document(path)
        except OSError as error:
            raise VerificationError(f"{path} cannot be read: {error}") from error

    def files(self, candidate: Candidate, metadata: Metadata) -> Files:
        repo_id, root = candidate.repo_id, self._cache.root
        with usage.shared(usage.repository_lock(root, repo_id)):
            usage.hold(usage.snapshot_lock(root, repo_id, _commit(candidate)))
            return self._files(candidate, metadata)

    def read_card(self, candidate: Candidate) -> bytes | None:
        with usage.shared(usage.repository_lock(self._cache.root, candidate.repo_id)):
            repo_id, commit = candidate.repo_id, _commit(candidate)
            self._client.fetch(repo_id, commit, [CARD_FILE], local=not self._reachable(repo_id))
            try:
                return (self._cache.snapshot(repo_id, commit) / CARD_FILE).read_bytes()
            except OSError:
                return None

    def local_path(self, candidate: Candidate) -> Path | None:
        folder = self._cache.snapshot(candidate.repo_id, _commit(candidate)) / "build" / candidate.variant
        return folder if folder.is_dir() else None

    def _files(self, candidate: Candidate, metadata: Metadata) -> Files:
        repo_id, commit = candidate.repo_id, _commit(candidate)
        listed = self._listed(candidate)
        if listed is not None:
            size = sum(entry.size for entry in listed.values())
            if excess := excessive(len(listed), size):
                raise VerificationError(f"{candidate.address} holds {excess}; nothing of it was run")
        digested = metadata.digest.files if metadata.digest else ()
        self._complete(candidate, listed if listed is not None else digested)
        refs = self._asked.get(repo_id)
        if candidate.location and refs is not None and refs.reached:
            self._cache.write_ref(repo_id, candidate.location, commit)
        path = self._cache.snapshot(repo_id, commit) / "build" / candidate.variant
        return Files(
            path,
            # The listing of the commit, which is what a version was resolved to, vouches for files as well.
            digests_required=listed is None,
            git_ids={name: entry.id for name, entry in listed.items()} if listed is not None else None,
            # A snapshot consists of links into the cache's blobs. They are followed, rather than copied to
            # files of their own, so that each file exists once and is shared with stock `kernels`; nowhere
            # else may they lead. The whole cache is allowed for, since a blob may itself be a link into the
            # store that the repositories of a cache share. What they lead to is hashed like any file.
            links_into=self._cache.root,
            remedy=f"to download it again, delete {path.parents[3]}",
        )

    @functools.cached_property
    def _cache(self) -> HubCache:
        from huggingface_hub import constants

        return HubCache(Path(self._cache_folder or constants.HF_HUB_CACHE).expanduser())

    @functools.cached_property
    def _client(self) -> HubClient:
        return HubClient(self._cache.root, self._endpoint, self._user_agent, local_only=self._local_only)

    def _listed(self, candidate: Candidate) -> dict[str, Entry] | None:
        """The files of a build by their paths in its folder, None where no listing is here."""
        listing = self._cache.listing(candidate.repo_id, _commit(candidate))
        if listing is None:
            return None
        folder = f"build/{candidate.variant}/"
        return {
            path.removeprefix(folder): entry
            for path, entry in listing.items()
            if path.startswith(folder) and not any(fnmatch.fnmatch(path, pattern) for pattern in BYTECODE)
        }

    def _complete(self, candidate: Candidate, names: Collection[str]) -> None:
        """Downloads those files of a build that are not here, and sees that none of `names` is damaged.

        What is damaged is removed, so that the next load fetches it.

        Raises:
            SourceUnavailableError: Some cannot be fetched.
            VerificationError: Some arrived damaged, or were changed here.
        """
        repo_id, commit, folder = candidate.repo_id, _commit(candidate), f"build/{candidate.variant}"
        path = self._cache.snapshot(repo_id, commit) / folder

        def absent() -> list[str]:
            return sorted(name for name in names if not (path / name).exists())

        if lacking := absent():
            patterns = [f"{folder}/{METADATA_FILE}"] if lacking == [METADATA_FILE] else [f"{folder}/*"]
            self._fetch(candidate, patterns)
        # huggingface_hub gives back what there is when it can get no listing: perhaps the metadata alone.
        if lacking := absent():
            raise SourceUnavailableError(
                f"{candidate} is in the cache in part only, without {', '.join(lacking)}, and the Hub "
                f"({self._client.endpoint}) cannot be asked for the rest; load it once while it can"
            )
        if damaged := self._cache.drop_damaged(repo_id, commit, candidate.variant, names):
            raise VerificationError(
                f"the files in {path} are not the ones its commit lists:\n  "
                + "\n  ".join(f"changed: {name}" for name in damaged)
                + "\nnothing of the kernel was run; they were removed, load it again to download them"
            )

    def _fetch(self, candidate: Candidate, patterns: Sequence[str]) -> None:
        """Downloads what matches `patterns` and is not here, as far as requests are possible."""
        repo_id, commit = candidate.repo_id, _commit(candidate)
        try:
            self._client.fetch(repo_id, commit, patterns, local=not self._reachable(repo_id))
        except VerificationError:
            self._cache.drop_listing(repo_id, commit)
            raise

    def _targets(self, reference: Reference) -> list[tuple[int | None, str, str]]:
        """Version, ref and commit of each build that matches."""
        repo_id, revision = reference.repo_id, reference.revision
        if revision is not None and COMMIT.fullmatch(revision):
            return [(None, "", revision)]
        ref = revision if revision is not None else f"v{reference.version}"
        if reference.pinned and (commit := self._cache.fresh_commit(repo_id, ref, self._fresh)):
            return [(version_of_branch(ref), ref, commit)]
        refs = self._refs(repo_id)
        if revision is not None:
            commit = refs.commits.get(revision)
            if commit is None and refs.reached:
                commit = self._client.commit(repo_id, revision, patient=True)
            return [(version_of_branch(revision), revision, commit)] if commit is not None else []
        versions = self.versions(repo_id) if reference.version is None else [reference.version]
        named = [(version, f"v{version}") for version in versions]
        return [(version, ref, refs.commits[ref]) for version, ref in named if ref in refs.commits]

    def _refs(self, repo_id: str) -> _Refs:
        if repo_id not in self._asked:
            self._asked[repo_id] = self._ask_for_refs(repo_id)
        return self._asked[repo_id]

    def _ask_for_refs(self, repo_id: str) -> _Refs:
        cached = self._cache.refs(repo_id)
        if self._client.offline:
            return _Refs(cached, reached=False)
        try:
            # With a copy at hand there is no point in waiting for a busy Hub.
            return _Refs(self._client.refs(repo_id, patient=not cached) or {}, reached=True)
        except SourceUnavailableError as error:
            if not cached:
                raise SourceUnavailableError(f"{error}; the cache has no copy of it") from error
            warn_once(f"{error}; the cache serves {repo_id} as it was last fetched")
            return _Refs(cached, reached=False)

    def _reachable(self, repo_id: str) -> bool:
        """Whether asking the Hub is allowed and has not failed before in this call."""
        refs = self._asked.get(repo_id)
        return not self._client.offline and (refs is None or refs.reached)

    def _why_trusted(self, repo_id: str, commit: str) -> str:
        """Who vouches for a repository; raises UntrustedKernelError where nobody does."""
        if reason := self.trust.reason(repo_id):
            return reason
        organisation = repo_id.partition("/")[0]
        endpoint = self._client.endpoint
        because = f"the Hub calls {organisation} a trusted publisher"
        reachable = self._reachable(repo_id)
        # The Hub is asked again for each new commit, so that what it no longer vouches for is not fetched.
        if (not reachable or self._cache.has(repo_id, commit)) and self._cache.knows_publisher(
            repo_id, endpoint
        ):
            return because
        if not reachable:
            raise untrusted(repo_id, f"the Hub ({endpoint}) cannot be asked whether it trusts {organisation}")
        if not self._client.is_trusted_publisher(organisation):
            raise untrusted(repo_id, f"the Hub ({endpoint}) does not call {organisation} a trusted publisher")
        self._cache.remember_publisher(repo_id, endpoint)
        return because

    def _tell_of_newer(self, repo_id: str, version: int) -> None:
        newest = self.versions(repo_id)[0]
        if newest > version:
            warn_once(f"{repo_id}: version {version} was asked for; there is a newer one: version={newest}")

    def _address(self, repo_id: str, commit: str) -> str:
        return f"{self._client.endpoint}/kernels/{repo_id}/tree/{commit}/build/{VARIANT}"


def _commit(candidate: Candidate) -> str:
    assert candidate.commit is not None
    return candidate.commit
