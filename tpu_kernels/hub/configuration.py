"""Which sources are asked, in which order: by the call, by the environment, by default."""

from __future__ import annotations

import os
import urllib.parse
import urllib.request
from pathlib import Path

from ..errors import ConfigurationError
from .bucket import BucketSource
from .hub_source import HubSource
from .reference import is_repo_id
from .sources import LocalSource, RegistrySource, Source, registry_root
from .trust import Trust

SOURCES_VARIABLE = "TPU_KERNELS_SOURCES"
ENDPOINT_VARIABLE = "HF_ENDPOINT"
CACHE_VARIABLE = "KERNELS_CACHE"
LOCAL_VARIABLE = "LOCAL_KERNELS"
DEFAULT_SOURCES = "local,registry,hub"


def configured_sources(
    source: str | os.PathLike[str] | None, trust: Trust, user_agent: str | None = None
) -> tuple[Source, ...]:
    """The sources to ask, in order: `source` alone, else those of `TPU_KERNELS_SOURCES`, else the default.

    A source is `local` (what `LOCAL_KERNELS` names), `registry` (what ships with this package), `hub`, or
    the folder or URL of a registry. The variable has commas between them.

    Raises:
        ConfigurationError: One of them is none of these, or `LOCAL_KERNELS` cannot be read.

    Example:
        >>> [source.name for source in configured_sources("registry", Trust())]
        ['registry']
    """
    if source is not None:
        return (_source(os.fspath(source), "source", trust, user_agent),)
    names = os.environ.get(SOURCES_VARIABLE) or DEFAULT_SOURCES
    sources = [
        _source(name.strip(), SOURCES_VARIABLE, trust, user_agent)
        for name in names.split(",")
        if name.strip()
    ]
    # Without overrides there is nothing to say about them.
    return tuple(source for source in sources if source != LocalSource(()))


def local_overrides() -> tuple[tuple[str, Path], ...]:
    """What `LOCAL_KERNELS` says: `org/name=path`, with colons between entries, as for stock `kernels`.

    Raises:
        ConfigurationError: An entry has another form.
    """
    overrides = []
    for entry in filter(None, os.environ.get(LOCAL_VARIABLE, "").split(":")):
        repo_id, _, path = entry.partition("=")
        if not path or not is_repo_id(repo_id):
            raise ConfigurationError(
                f"{LOCAL_VARIABLE} has the entry {entry!r}; write org/name=path, and ':' between entries"
            )
        overrides.append((repo_id, Path(path)))
    return tuple(overrides)


def _source(name: str, origin: str, trust: Trust, user_agent: str | None) -> Source:
    if name == "local":
        return LocalSource(local_overrides())
    if name == "registry":
        return RegistrySource(registry_root())
    if name == "hub":
        # huggingface_hub reads the address once, when it is imported; here it may be set later.
        endpoint = os.environ.get(ENDPOINT_VARIABLE, "").rstrip("/") or None
        return HubSource(trust, endpoint, os.environ.get(CACHE_VARIABLE) or None, user_agent)
    if name.startswith("file://"):
        path = urllib.request.url2pathname(urllib.parse.urlsplit(name).path)
        return RegistrySource(Path(path), name)
    if "://" in name:
        return BucketSource(name)
    if os.sep in name or Path(name).is_dir():
        return RegistrySource(Path(name), name)
    raise ConfigurationError(
        f"{origin} names {name!r}, which is no source; write local, registry, hub, a folder (./{name}) or a "
        "URL (gs://bucket/kernels)"
    )
