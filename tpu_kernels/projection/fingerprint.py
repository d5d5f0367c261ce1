"""What a projection depends on beside what was asked for."""

from __future__ import annotations

import hashlib
import json
from importlib import resources


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
