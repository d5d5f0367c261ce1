"""Loads a kernel and registers it with transformers, and prints what happened as JSON.

Run as a process of its own, so that what it imports, and a crash of that, stays there.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from ..hub import get_kernel
from ..integrations.transformers import EXPERTS_KERNELS, PREFIX, enable


def main() -> None:
    """Prints `kernel` and `transformers`, each an error or None, and `table`, the names of ours there."""
    outcome: dict[str, Any] = {"kernel": None, "transformers": None, "table": []}
    try:
        for repo_id, version in EXPERTS_KERNELS:
            get_kernel(repo_id, version=version)
    except Exception as error:  # noqa: BLE001  whatever it is, it is what the doctor has to tell
        outcome["kernel"] = _tell(error)
    else:
        try:
            enable()
            from transformers.integrations.moe import ExpertsInterface

            outcome["table"] = sorted(n for n in ExpertsInterface._global_mapping if n.startswith(PREFIX))
        except Exception as error:  # noqa: BLE001
            outcome["transformers"] = _tell(error)
    sys.stdout.write(f"\n{json.dumps(outcome)}\n")


def _tell(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
