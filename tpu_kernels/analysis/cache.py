"""Outcomes of compiles, simulations and projections, kept by what determines them.

One JSON file each, in `TPU_KERNELS_CACHE`/<kind>, by default `~/.cache/tpu-kernels/<kind>`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..files import replace_file
from ..log import get_logger, warn_once
from .export import Program
from .outcome import Outcome
from .target import CompileTarget

T = TypeVar("T")
Kind = Literal["compile", "simulate", "project"]

FOLDER_VARIABLE = "TPU_KERNELS_CACHE"
KINDS: tuple[Kind, ...] = ("compile", "simulate", "project")
_FORMAT = 2  # goes up when `Outcome` or what the worker puts into it changes
# The compiler's flags are given to it by these.
_FLAG_VARIABLES = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")


def cache_folder(kind: str = "compile") -> Path:
    """Where things of a kind are kept. The folder may be deleted at any time."""
    root = os.environ.get(FOLDER_VARIABLE)
    if root:
        return Path(root) / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpu-kernels" / kind


@functools.cache
def versions() -> dict[str, str]:
    """The installed versions that a program's compilation depends on."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}


def cache_key(program: Program, target: CompileTarget) -> str:
    """Names the outcome of compiling `program` for `target` with this compiler and its flags."""
    extra = ["every schedule"] if program.every_schedule else []
    return digest(_FORMAT, program.fingerprint, program.devices, target.topology, *extra)


def digest(*parts: Any) -> str:
    """A key from `parts`, which JSON must take, and from the compiler and its flags."""
    flags = {name: os.environ.get(name, "") for name in _FLAG_VARIABLES}
    text = json.dumps([*parts, versions(), flags], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def load(key: str) -> Outcome | None:
    """The outcome kept under `key`; None if there is none, or none that can be read."""
    return read("compile", key, Outcome.from_json)


def store(key: str, outcome: Outcome) -> None:
    """Keeps `outcome`. A cache that cannot be written is a warning: the work is done all the same."""
    write("compile", key, outcome.to_json())


def read(kind: str, key: str, parse: Callable[[str], T]) -> T | None:
    """What is kept under `key` among things of its kind; None if there is nothing that can be parsed.

    Args:
        kind: The folder.
        key: The name.
        parse: From the text; raises ValueError where it cannot.
    """
    path = cache_folder(kind) / f"{key}.json"
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        get_logger().info("%s cannot be used and will be replaced: %s", path, error)
        return None


def kept() -> list[tuple[Kind, Path]]:
    """The kind and the file of everything that is kept."""
    return [(kind, path) for kind in KINDS for path in sorted(cache_folder(kind).glob("*.json"))]


def write(kind: str, key: str, text: str) -> None:
    """Keeps `text` for `read`. A cache that cannot be written is a warning."""
    path = cache_folder(kind) / f"{key}.json"
    try:
        # In one step, as other processes may read and write the same entry.
        replace_file(path, text.encode())
    except OSError as error:
        warn_once(
            f"what is computed is not kept: {error}; set {FOLDER_VARIABLE} to a folder that can be written"
        )
