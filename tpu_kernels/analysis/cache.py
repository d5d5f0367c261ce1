"""Outcomes of compiles, kept by what determines them.

One JSON file a program, in `TPU_KERNELS_CACHE`/compile, by default `~/.cache/tpu-kernels/compile`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import tempfile
from pathlib import Path

from ..log import get_logger, warn_once
from .export import Program
from .outcome import Outcome
from .target import CompileTarget

FOLDER_VARIABLE = "TPU_KERNELS_CACHE"
_FORMAT = 2  # goes up when `Outcome` or what the worker puts into it changes
# The compiler's flags are given to it by these.
_FLAG_VARIABLES = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")


def cache_folder() -> Path:
    """Where outcomes are kept. The folder may be deleted at any time."""
    root = os.environ.get(FOLDER_VARIABLE)
    if root:
        return Path(root) / "compile"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpu-kernels" / "compile"


@functools.cache
def versions() -> dict[str, str]:
    """The installed versions that a program's compilation depends on."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}


def cache_key(program: Program, target: CompileTarget) -> str:
    """Names the outcome of compiling `program` for `target` with this compiler and its flags."""
    flags = {name: os.environ.get(name, "") for name in _FLAG_VARIABLES}
    parts = [_FORMAT, program.fingerprint, program.devices, target.topology, versions(), flags]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def load(key: str) -> Outcome | None:
    """The outcome kept under `key`; None if there is none, or none that can be read."""
    path = _path(key)
    try:
        return Outcome.from_json(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        get_logger().info("%s cannot be used and will be replaced: %s", path, error)
        return None


def store(key: str, outcome: Outcome) -> None:
    """Keeps `outcome`. A cache that cannot be written is a warning: the work is done all the same."""
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written whole and then renamed, as other processes may read and write the same entry.
        descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{key[:16]}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(outcome.to_json())
            Path(draft).replace(path)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise
    except OSError as error:
        warn_once(
            f"what is compiled is not kept: {error}; set {FOLDER_VARIABLE} to a folder that can be written"
        )


def _path(key: str) -> Path:
    return cache_folder() / f"{key}.json"
