"""The Hub over the network, through huggingface_hub: its answers as plain values, its failures as ours.

huggingface_hub brings the settings (`HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`, proxies, timeouts) and the
cache: files are downloaded beside their place, under a lock, and moved there when they are complete.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import KernelNotFoundError, SourceUnavailableError, VerificationError
from ..log import get_logger
from .cache import COMMIT

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

T = TypeVar("T")

# Not part of any build; stock `kernels` leaves them on the Hub too.
BYTECODE = ["*.pyc", "**/__pycache__/**"]

_BUSY = frozenset({429, 500, 502, 503, 504})
# Seconds before each further attempt, where the Hub does not say how long to wait.
_WAITS = (1.0, 3.0)
_LONGEST_WAIT = 60.0
_MOST_REFS = 10_000


class HubClient:
    """Asks the Hub. `None` for an answer means that there is no such thing there.

    Every method raises SourceUnavailableError where the Hub cannot be reached, is too busy or refuses.
    """

    def __init__(
        self,
        cache: Path,
        endpoint: str | None = None,
        user_agent: str | None = None,
        *,
        local_only: bool = False,
    ) -> None:
        self._cache = cache
        self._endpoint = endpoint
        self._user_agent = user_agent
        self._local_only = local_only

    @functools.cached_property
    def _api(self) -> HfApi:
        from huggingface_hub import HfApi

        from .. import __version__

        return HfApi(
            endpoint=self._endpoint,
            library_name="tpu-kernels",
            library_version=__version__,
            user_agent=self._user_agent,
        )

    @property
    def endpoint(self) -> str:
        """The address of the Hub."""
        from huggingface_hub import constants

        return self._endpoint or constants.ENDPOINT

    @property
    def offline(self) -> bool:
        """Whether requests are forbidden, by the caller or by the user (`HF_HUB_OFFLINE`)."""
        from huggingface_hub import constants

        return self._local_only or bool(constants.HF_HUB_OFFLINE)

    def refs(self, repo_id: str, *, patient: bool) -> dict[str, str] | None:
        """The commit of each branch and tag. `patient` waits for a busy Hub."""
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        with self._failures(f"{repo_id} was not looked up"):
            try:
                refs = self._ask(lambda: self._api.list_repo_refs(repo_id, repo_type="kernel"), patient)
            except GatedRepoError:
                raise
            except RepositoryNotFoundError:
                return None
            found = [*refs.tags, *refs.branches]
            if len(found) > _MOST_REFS:
                raise ValueError(f"{len(found)} branches and tags, more than the {_MOST_REFS} that are read")
            # Branches last: where a tag has the name of a branch, stock takes the branch.
            return {_name(ref.name, repo_id): _commit(ref.target_commit, repo_id) for ref in found}

    def commit(self, repo_id: str, revision: str, *, patient: bool) -> str | None:
        """The commit of a revision that is no branch and no tag, such as the start of a commit."""
        from huggingface_hub.errors import RevisionNotFoundError

        with self._failures(f"{repo_id} was not looked up"):
            try:
                info = self._ask(
                    lambda: self._api.repo_info(repo_id, repo_type="kernel", revision=revision), patient
                )
            except RevisionNotFoundError:
                return None
            return _commit(info.sha, repo_id)

    def is_trusted_publisher(self, organisation: str) -> bool:
        """Whether the Hub calls an organisation a trusted kernel publisher; an account is none."""
        from huggingface_hub.errors import HfHubHTTPError

        with self._failures(f"whether {organisation} is a trusted publisher was not looked up"):
            try:
                info = self._ask(lambda: self._api.get_organization_overview(organisation), patient=True)
            except HfHubHTTPError as error:
                if error.response.status_code == 404:
                    return False
                raise
            return getattr(info, "trustedKernelPublisher", False) is True

    def fetch(self, repo_id: str, commit: str, patterns: Sequence[str], *, local: bool) -> None:
        """Downloads the files of a commit that match `patterns` and that the cache lacks, and its listing.

        Nothing is downloaded where `local` is set.

        Raises:
            KernelNotFoundError: There is no such commit.
            VerificationError: The listing of the commit, as it is here, names a file that the commit lacks.
        """
        from huggingface_hub.errors import RemoteEntryNotFoundError, RevisionNotFoundError

        with self._failures(f"{repo_id} was not downloaded"):
            try:
                self._api.snapshot_download(
                    repo_id,
                    repo_type="kernel",
                    revision=commit,
                    cache_dir=self._cache,
                    allow_patterns=list(patterns),
                    ignore_patterns=BYTECODE,
                    local_files_only=local,
                    tqdm_class=_no_progress(),
                )
            except RevisionNotFoundError as error:
                raise KernelNotFoundError(
                    f"{repo_id} has no commit {commit} (Hub: {self.endpoint})"
                ) from error
            except RemoteEntryNotFoundError as error:
                raise VerificationError(
                    f"the listing of {repo_id} at {commit} in the cache is damaged: it names a file that the Hub "
                    f"({self.endpoint}) does not have: {_first_line(error)}; load it again to fetch the listing"
                ) from error

    def _ask(self, call: Callable[[], T], patient: bool) -> T:
        """The answer of `call`, which huggingface_hub itself would try once only."""
        from huggingface_hub.errors import HfHubHTTPError

        for wait in _WAITS if patient else ():
            try:
                return call()
            except HfHubHTTPError as error:
                if error.response.status_code not in _BUSY:
                    raise
                wait = _wait(error, wait)
                get_logger().info("the Hub is busy, asking again in %g s: %s", wait, _first_line(error))
                time.sleep(wait)
        return call()

    @contextlib.contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        # httpx, under whichever name this version of huggingface_hub has it.
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

        try:
            yield
        except (HTTPError, OSError) as error:
            # Where huggingface_hub looked in its cache in vain, what made it look there tells more.
            cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
            raise SourceUnavailableError(f"{what} (Hub: {self.endpoint}): {_first_line(cause)}") from error
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            # What huggingface_hub meets in an answer that is not what it should be.
            raise SourceUnavailableError(
                f"{what} (Hub: {self.endpoint}): the answer makes no sense: {_first_line(error)}"
            ) from error


@functools.cache
def _no_progress() -> type[Any]:
    from huggingface_hub.utils.tqdm import tqdm

    # A kernel is a few small files; a bar for each step of looking for it tells nothing.
    class NoProgress(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

    return NoProgress


def _name(value: object, repo_id: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no branch or tag of {repo_id}")
    return value


def _commit(value: object, repo_id: str) -> str:
    # It becomes the name of a folder.
    if not isinstance(value, str) or not COMMIT.fullmatch(value):
        raise ValueError(f"{value!r} is no commit of {repo_id}")
    return value


def _wait(error: HfHubHTTPError, default: float) -> float:
    after = error.response.headers.get("Retry-After", "")
    return min(float(after), _LONGEST_WAIT) if re.fullmatch(r"\d{1,6}", after) else default


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason').splitlines()[0]}"
