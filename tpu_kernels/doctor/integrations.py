"""Whether a kernel loads, and whether transformers takes it: tried in a process that opens no TPU."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from ..integrations.transformers import EXPERTS_KERNELS
from ..packages import installed
from .finding import Finding

_SECTION = "integrations"
_DEADLINE = 180.0
_PACKAGE_PARENT = Path(__file__).parents[2]


def examine(*, offline: bool) -> Iterator[Finding]:
    """Loading a kernel, transformers' tables, and which stock `kernels` transformers would take."""
    outcome = _probe(offline=offline)
    name = ", ".join(f"{repo_id} v{version}" for repo_id, version in EXPERTS_KERNELS)
    if error := outcome.get("kernel"):
        remedy = f"tpu-kernels explain {EXPERTS_KERNELS[0][0]} --version {EXPERTS_KERNELS[0][1]}"
        yield Finding(_SECTION, "problem", "kernels", f"{name}: not all load: {error}", remedy)
    else:
        yield Finding(_SECTION, "ok", "kernels", f"{name}: they load (tried without opening a TPU)")
    version = installed("transformers")
    if version is None:
        return
    if table := outcome.get("table"):
        names = ", ".join(table)
        yield Finding(_SECTION, "ok", "transformers", f"{version} knows, once enabled, the experts {names}")
    else:
        error = outcome.get("transformers") or "it was not tried"
        remedy = "models run their own experts until then; pip install 'tpu-kernels[transformers]'"
        yield Finding(_SECTION, "warning", "transformers", f"{version} takes no kernel: {error}", remedy)
    yield from _stock(version)


def _stock(version: str) -> Iterator[Finding]:
    """The range of stock `kernels` that transformers takes changes with each of its versions."""
    stock = installed("kernels")
    ranges = [
        requirement.specifier
        for requirement in map(Requirement, importlib.metadata.requires("transformers") or ())
        if requirement.name == "kernels"
    ]
    if stock is None or not ranges:
        return
    if ranges[0].contains(stock, prereleases=True):
        message = f"transformers {version} takes {stock}"
        yield Finding(_SECTION, "ok", "stock kernels", message)
    else:
        message = (
            f"transformers {version} takes {ranges[0]}, not {stock}: its own loading of kernels is off; "
            "this package's experts are in its tables all the same"
        )
        remedy = f"if you need that too: pip install 'kernels{ranges[0]}'"
        yield Finding(_SECTION, "warning", "stock kernels", message, remedy)


def _probe(*, offline: bool) -> dict[str, Any]:
    """What `probe` says; its error under `kernel` if it says nothing."""
    path = os.pathsep.join(filter(None, [str(_PACKAGE_PARENT), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        # torch would load torch_tpu and JAX its own client, and each would open the chips.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        **({"HF_HUB_OFFLINE": "1"} if offline else {}),
    }
    command = [sys.executable, "-P", "-m", f"{__package__}.probe"]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_DEADLINE, check=False
        )
    except subprocess.TimeoutExpired:
        return {"kernel": f"it did not within {_DEADLINE:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"kernel": said}
    outcome: dict[str, Any] = json.loads(lines[-1])
    return outcome
