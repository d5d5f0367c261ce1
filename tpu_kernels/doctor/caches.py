"""The caches: where they are, how large, and whether they can be written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..analysis.cache import KINDS, cache_folder
from ..analysis.sizes import format_bytes
from ..hub.bucket import builds_folder
from ..hub.manage.inventory import cached_items, hub_cache_folder
from .finding import Finding, within

_SECTION = "caches"
_DEADLINE = 20.0
_LITTLE = 1 << 30  # bytes free on a disk


def examine() -> Iterator[Finding]:
    """Each cache."""
    try:
        items = within(_DEADLINE, cached_items)
        sizes = {name: sum(i.size for i in items if i.cache == name) for name in ("hub", "builds")}
    except TimeoutError:
        sizes = {}
    yield _cache("kernels of the Hub", hub_cache_folder(), sizes.get("hub"))
    yield _cache("kernels of buckets", builds_folder(), sizes.get("builds"))
    for kind in KINDS:
        outcomes = cache_folder(kind)
        yield _cache(
            f"outcomes of {kind}", outcomes, sum(path.stat().st_size for path in outcomes.glob("*.json"))
        )


def _cache(subject: str, folder: Path, size: int | None) -> Finding:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    held = "too large to count in time" if size is None else format_bytes(size)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        message = f"{folder} ({held}) cannot be written: it serves what it holds, and nothing is added"
        remedy = (
            f"make {existing} a folder that you may write, or set HF_HOME, KERNELS_CACHE or TPU_KERNELS_CACHE"
        )
        return Finding(_SECTION, "warning", subject, message, remedy)
    free = shutil.disk_usage(existing).free
    message = f"{folder}: {held}, {format_bytes(free)} free"
    if free < _LITTLE:
        remedy = "free some: tpu-kernels cache prune --older-than 30d"
        return Finding(_SECTION, "warning", subject, f"{message}; downloads may fail", remedy)
    return Finding(_SECTION, "ok", subject, message)
