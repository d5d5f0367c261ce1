"""What a projection depends on beside what was asked for."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from importlib import resources

_PACKAGES = ("torch", "torch-tpu", "jax", "libtpu", "transformers", "tpu-kernels")


def versions() -> dict[str, str | None]:
    """The installed versions that a projection depends on; None of what is not installed."""

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {name.replace("-", "_"): version(name) for name in _PACKAGES}


def fingerprint() -> str:
    """A hash of what a projection is made by: this package, the simulator, and the kernels that this release loads."""
    from .. import hub
    from ..analysis.simulator.fingerprint import simulator_fingerprint
    from ..integrations import attention, transformers

    found = hashlib.sha256(simulator_fingerprint().encode())
    for file in sorted(resources.files(__package__).iterdir(), key=lambda entry: entry.name):
        if file.name.endswith((".py", ".json")):
            found.update(file.name.encode() + b"\0" + file.read_bytes())
    for repository, version in (*transformers.EXPERTS_KERNELS, attention.KERNEL):
        build = hub.explain(repository, version=version).build
        if build is not None and build.metadata.digest is not None:
            found.update(json.dumps(dict(build.metadata.digest.files), sort_keys=True).encode())
    return found.hexdigest()
