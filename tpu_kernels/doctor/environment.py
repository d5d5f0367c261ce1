"""Environment variables that matter: which are set, and what they do now."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Iterator

from ..analysis.cache import FOLDER_VARIABLE
from ..errors import ConfigurationError, LockError
from ..hub.configuration import (
    CACHE_VARIABLE,
    DEFAULT_SOURCES,
    ENDPOINT_VARIABLE,
    FRESH_VARIABLE,
    LOCAL_VARIABLE,
    LOCK_VARIABLE,
    SOURCES_VARIABLE,
    configured_sources,
)
from ..hub.trust import FILE_VARIABLE, LIST_VARIABLE, Trust
from ..log import LEVEL_VARIABLE
from ..packages import installed
from .finding import Finding

_SECTION = "environment"
_PREFIX = "TPU_KERNELS_"
_SECRET = "HF_TOKEN"
_EFFECTS = {
    SOURCES_VARIABLE: f"the sources, in order, instead of {DEFAULT_SOURCES}",
    LIST_VARIABLE: "whom to trust, beside the publishers that the Hub trusts",
    FILE_VARIABLE: "a file of whom to trust",
    FOLDER_VARIABLE: "where outcomes of the compiler are kept",
    LEVEL_VARIABLE: "what is logged",
    "TPU_KERNELS_EMULATE": "pytest runs on an emulated TPU if it is 1",
    LOCK_VARIABLE: "the lock that says which builds to take",
    FRESH_VARIABLE: "seconds for which what the Hub said is not asked for again",
    LOCAL_VARIABLE: "folders that come before every other source",
    CACHE_VARIABLE: "the Hub's cache, for kernels only",
    "HF_HUB_CACHE": f"the Hub's cache, where {CACHE_VARIABLE} is not set",
    "HF_HOME": "where huggingface_hub keeps its cache and token, and this package builds from buckets",
    ENDPOINT_VARIABLE: "the Hub's address",
    _SECRET: "who asks the Hub; its value is not shown",
    "HF_HUB_OFFLINE": "if it is 1, no request is sent to the Hub: kernels come from the cache",
    "HF_HUB_DISABLE_TELEMETRY": "less is said to the Hub about who asks",
    "DISABLE_TELEMETRY": "less is said to the Hub about who asks",
    "DO_NOT_TRACK": "less is said to the Hub about who asks",
    "DISABLE_KERNEL_MAPPING": "stock kernels replaces no layers",
    "JAX_PLATFORMS": "what JAX may open",
    "TPU_SKIP_MDS_QUERY": "libtpu asks no metadata server for TPUs",
    "TPU_LIBRARY_PATH": "the libtpu that is loaded",
    "LIBTPU_INIT_ARGS": "flags of the TPU compiler",
    "XLA_FLAGS": "flags of XLA",
}
_NO_TELEMETRY = ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK")
_STOCK_WITHOUT_AGENT = "0.17.2"


def examine() -> Iterator[Finding]:
    """Each variable that is set, and those that cannot be read or mean nothing."""
    for name, effect in _EFFECTS.items():
        if value := os.environ.get(name):
            shown = "set" if name == _SECRET else _without_password(value)
            yield Finding(_SECTION, "ok", name, f"{shown}: {effect}")
    yield from _unknown()
    yield from _unreadable()
    yield from _stock_user_agent()


def _unknown() -> Iterator[Finding]:
    for name in sorted(os.environ):
        if name.startswith(_PREFIX) and name not in _EFFECTS:
            close = difflib.get_close_matches(name, _EFFECTS, n=1)
            hint = f"did you mean {close[0]}?" if close else "unset it"
            yield Finding(_SECTION, "warning", name, "is no variable of this package, and does nothing", hint)


def _unreadable() -> Iterator[Finding]:
    try:
        configured_sources(None, Trust.of())
    except (ConfigurationError, LockError) as error:
        yield Finding(_SECTION, "problem", "configuration", str(error), "correct or unset it")
    level = os.environ.get(LEVEL_VARIABLE, "")
    if level and level.upper() not in logging.getLevelNamesMapping():
        remedy = "use debug, info, warning or error"
        yield Finding(_SECTION, "warning", LEVEL_VARIABLE, f"{level} is no log level", remedy)


def _stock_user_agent() -> Iterator[Finding]:
    off = [name for name in _NO_TELEMETRY if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")]
    if off and installed("kernels") == _STOCK_WITHOUT_AGENT:
        message = (
            f"stock kernels {_STOCK_WITHOUT_AGENT} sends an empty user agent, which is refused before it is "
            "sent: it loads nothing from the Hub; this package does"
        )
        yield Finding(_SECTION, "warning", ", ".join(off), message, "unset it where stock kernels is used")


def _without_password(value: str) -> str:
    return re.sub(r"://[^/@\s]*@", "://...@", value)
