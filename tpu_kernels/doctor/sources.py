"""Whether each source of kernels answers."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ..errors import ConfigurationError, LockError, SourceUnavailableError, TpuKernelsError
from ..hub.bucket import BucketSource
from ..hub.configuration import configured_sources
from ..hub.hub_source import HubSource
from ..hub.lock_source import LockSource
from ..hub.manage.inventory import read_metadata
from ..hub.sources import IndexedSource, LocalSource, Source, local_builds
from ..hub.trust import Trust
from .finding import Finding, within

_SECTION = "sources"
_DEADLINE = 10.0
_TIMEOUT = 5.0


def examine(*, offline: bool) -> Iterator[Finding]:
    """Each source in the order it is asked. Those that do not answer are a problem if none does."""
    try:
        sources = configured_sources(None, Trust.of())
    except (ConfigurationError, LockError):
        return  # the environment says why
    answers: dict[str, str] = {}
    failures: dict[str, str] = {}
    for source in sources:
        if isinstance(source, LocalSource):
            yield from _overrides(source)
        elif isinstance(source, LockSource):
            kernels = f"locks {len(source.lock.kernels)} kernels, served by the sources behind it"
            yield Finding(_SECTION, "ok", source.name, f"{source.lock.origin} {kernels}")
        elif offline and isinstance(source, (HubSource, BucketSource)):
            answers[source.name] = "not asked (--offline)"
        else:
            try:
                answers[source.name] = within(_DEADLINE, functools.partial(_ask, source))
            except (TpuKernelsError, TimeoutError) as error:
                failures[source.name] = str(error)
    for name, message in answers.items():
        yield Finding(_SECTION, "ok", name, message)
    for name, message in failures.items():
        remedy = "check its address and the network; until then the cache and the other sources serve"
        yield Finding(_SECTION, "warning" if answers else "problem", name, message, remedy)


def _ask(source: Source) -> str:
    if isinstance(source, HubSource):
        return _ask_hub(source.endpoint)
    assert isinstance(source, IndexedSource)
    return f"answers, with {len(source.index.kernels)} kernels"


def _ask_hub(endpoint: str) -> str:
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    if constants.HF_HUB_OFFLINE:
        return "is not asked (HF_HUB_OFFLINE): the cache serves what was fetched before"
    headers = build_hf_headers()
    try:
        answer = get_session().get(f"{endpoint}/api/whoami-v2", headers=headers, timeout=_TIMEOUT)
    except (HTTPError, OSError, ValueError) as error:
        raise SourceUnavailableError(
            f"{endpoint} does not answer: {type(error).__name__}: {error}"
        ) from error
    if answer.status_code >= 500:
        raise SourceUnavailableError(f"{endpoint} answers with status {answer.status_code}")
    if answer.status_code == 401 and "authorization" in headers:
        raise SourceUnavailableError(f"{endpoint} does not accept the token; log in again: hf auth login")
    return f"{endpoint} answers{', and knows the token' if answer.status_code == 200 else ''}"


def _overrides(source: LocalSource) -> Iterator[Finding]:
    for repo_id, folder in source.folders:
        try:
            metadata = read_metadata(local_builds(folder)[0])
        except TpuKernelsError as error:
            remedy = "build it there, or take it out of LOCAL_KERNELS"
            yield Finding(_SECTION, "problem", source.name, f"{repo_id}: {error}", remedy)
            continue
        version = f"v{metadata.version}" if metadata else "with metadata that cannot be read"
        yield Finding(
            _SECTION, "ok" if metadata else "problem", source.name, f"{repo_id} {version} in {folder}"
        )
