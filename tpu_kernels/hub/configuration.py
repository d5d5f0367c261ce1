"""Which sources are asked, in which order: by the call, by the environment, by default."""

from __future__ import annotations

import os
import re
import sys
import urllib.parse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigurationError, LockError
from .hub_source import HubSource
from .layout import LOCK_FILE
from .reference import is_repo_id
from .sources import LocalSource, RegistrySource, Source, registry_root
from .trust import Trust

# What most programs do without is imported by those that need it: a cached load takes hardly longer than that.
if TYPE_CHECKING:
    from .lock import Lock
    from .lock_source import LockSource

SOURCES_VARIABLE = "TPU_KERNELS_SOURCES"
ENDPOINT_VARIABLE = "HF_ENDPOINT"
CACHE_VARIABLE = "KERNELS_CACHE"
LOCAL_VARIABLE = "LOCAL_KERNELS"
LOCK_VARIABLE = "TPU_KERNELS_LOCK"
FRESH_VARIABLE = "TPU_KERNELS_FRESH"
DEFAULT_SOURCES = "local,lock,registry,hub"
# As long as pip takes an index for fresh.
DEFAULT_FRESH = 600.0

# What serves a lock where no other source is configured.
_BEHIND_A_LOCK = ("registry", "hub")


def configured_sources(
    source: str | os.PathLike[str] | None,
    trust: Trust,
    user_agent: str | None = None,
    *,
    local_only: bool = False,
    project: Path | None = None,
) -> tuple[Source, ...]:
    """The sources to ask, in order: `source` alone, else those of `TPU_KERNELS_SOURCES`, else the default.

    A source is `local` (what `LOCAL_KERNELS` names), `lock` (see `lock_file`), `registry` (what ships with
    this package), `hub`, or the folder or URL of a registry. The variable has commas between them. Without
    overrides there is no `local`, and without a lock no `lock`. With `local_only` the Hub is asked for nothing.
    With `project` the lock is that of the project which this folder is in.

    Raises:
        ConfigurationError: One of them is none of these, or a variable cannot be read.
        LockError: The lock is malformed, or there is none and it is the only source or that of `project`.

    Example:
        >>> [source.name for source in configured_sources("registry", Trust())]
        ['registry']
    """
    if source is not None:
        names, origin = [os.fspath(source)], "source"
    else:
        listed = os.environ.get(SOURCES_VARIABLE) or DEFAULT_SOURCES
        names, origin = [name.strip() for name in listed.split(",") if name.strip()], SOURCES_VARIABLE
    if project is not None and "lock" not in names:
        raise ConfigurationError(
            f"{origin} leaves out the lock of {project}; add lock to it, or ask without the project"
        )
    sources: list[Source] = []
    for name in names:
        if name == "local":
            if overrides := local_overrides():
                sources.append(LocalSource(overrides))
        elif name == "lock":
            if (path := lock_file() if project is None else project_lock(project)) is not None:
                from .lock import read_lock

                lock = read_lock(path)
                sources.append(locked_source(lock, trust, user_agent, behind=names, local_only=local_only))
            elif project is not None:
                raise LockError(
                    f"there is no {LOCK_FILE} beside a pyproject.toml in {project} or above it; make one with: "
                    "tpu-kernels lock"
                )
            elif names == ["lock"]:
                raise LockError(
                    f"there is no lock: {LOCK_VARIABLE} names none, and beside the program's pyproject.toml there "
                    f"is no {LOCK_FILE}; make one with: tpu-kernels lock"
                )
        else:
            sources.append(_source(name, origin, trust, user_agent, local_only=local_only))
    return tuple(sources)


def locked_source(
    lock: Lock,
    trust: Trust,
    user_agent: str | None = None,
    *,
    behind: Iterable[str] = (),
    local_only: bool = False,
) -> LockSource:
    """The kernels of `lock`, served by those of the sources `behind` that can, else by the usual ones.

    The lock vouches for its kernels: it is part of the program that it belongs to, and whoever wrote it was
    asked then. With `local_only` the Hub is not asked for anything.
    """
    from .lock_source import LockSource

    vouched = {(kernel.repo_id, lock.origin) for kernel in lock.kernels}
    trust = Trust(trust.everyone, trust.names | vouched)
    names = [name for name in behind if name not in ("local", "lock")] or _BEHIND_A_LOCK
    sources = [_source(name, SOURCES_VARIABLE, trust, user_agent, local_only=local_only) for name in names]
    return LockSource(lock, tuple(sources))


def lock_file() -> Path | None:
    """The lock that the user names by `TPU_KERNELS_LOCK`, else that of the project which the program is in.

    That is the project of the script's folder, or of the working directory where Python runs none, as in a
    notebook. An installed program belongs to the project that its environment lies in, if any; never to the
    one that it happens to be started in, whose lock could choose what it runs.
    """
    if named := os.environ.get(LOCK_VARIABLE):
        return Path(named)
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        folder = Path(script).resolve().parent if script else Path.cwd()
    except OSError:
        return None
    return project_lock(folder)


def project_lock(folder: Path) -> Path | None:
    """`kernels.lock` beside the nearest `pyproject.toml` at or above `folder`, None where there is none."""
    folder = folder.absolute()
    for parent in (folder, *folder.parents):
        if (parent / "pyproject.toml").is_file():
            return parent / LOCK_FILE if (parent / LOCK_FILE).is_file() else None
    return None


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


def _source(
    name: str, origin: str, trust: Trust, user_agent: str | None, *, local_only: bool = False
) -> Source:
    if name == "registry":
        return RegistrySource(registry_root())
    if name == "hub":
        # huggingface_hub reads the address once, when it is imported; here it may be set later.
        endpoint = os.environ.get(ENDPOINT_VARIABLE, "").rstrip("/") or None
        cache = os.environ.get(CACHE_VARIABLE) or None
        return HubSource(trust, endpoint, cache, user_agent, fresh=_fresh(), local_only=local_only)
    if name.startswith("file://"):
        return RegistrySource(Path(urllib.parse.unquote(urllib.parse.urlsplit(name).path)), name)
    if "://" in name:
        from .bucket import BucketSource

        return BucketSource(name)
    if os.sep in name or Path(name).is_dir():
        return RegistrySource(Path(name), name)
    raise ConfigurationError(
        f"{origin} names {name!r}, which is no source; write local, lock, registry, hub, a folder (./{name}) or a "
        "URL (gs://bucket/kernels)"
    )


def _fresh() -> float:
    value = os.environ.get(FRESH_VARIABLE) or str(DEFAULT_FRESH)
    if not re.fullmatch(r"\d{1,9}(?:\.\d+)?", value):
        raise ConfigurationError(
            f"{FRESH_VARIABLE}={value!r} is no number of seconds; write one, such as 600"
        )
    return float(value)
