"""Self-tests: which kernels passed theirs here, and whether what runs them has changed since."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ..analysis.cache import cache_folder, read, write
from ..packages import installed
from .finding import Finding

_SECTION = "self-tests"
_KIND = "selftest"
# What turns a kernel into what a device runs.
_RUNNING = ("jax", "libtpu", "torch-tpu")


def remember(kernel: str) -> None:
    """Writes down that a kernel, `org/name`, has passed its self-test with the versions that are installed."""
    write(_KIND, kernel.replace("/", "--"), json.dumps({"kernel": kernel, "versions": _versions()}))


def examine() -> Iterator[Finding]:
    """Each kernel that has passed its self-test here."""
    now = _versions()
    for path in sorted(cache_folder(_KIND).glob("*.json")):
        record = read(_KIND, path.stem, json.loads)
        if not isinstance(record, dict) or not isinstance(record.get("versions"), dict):
            continue
        kernel, then = record.get("kernel"), record["versions"]
        changed = [
            f"{name} was {then.get(name)} and is {now[name]}" for name in now if then.get(name) != now[name]
        ]
        if changed:
            remedy = f"try it on this device: tpu-kernels selftest {kernel}"
            yield Finding(_SECTION, "warning", str(kernel), f"passed when {', '.join(changed)}", remedy)
        else:
            yield Finding(_SECTION, "ok", str(kernel), "passed with the versions that are installed")


def _versions() -> dict[str, str | None]:
    return {name: installed(name) for name in _RUNNING}
