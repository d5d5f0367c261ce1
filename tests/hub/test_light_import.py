"""Importing the package, the hub and the builder loads no heavy library."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "statement",
    [
        "import tpu_kernels",
        "import tpu_kernels.hub",
        "import tpu_kernels.authoring",
        "import tpu_kernels; tpu_kernels.explain('tpu-kernels/no-such-kernel', source='registry')",
        "import tpu_kernels; tpu_kernels.explain('tpu-kernels/ragged-dot', version=1)",
        "import tpu_kernels.testing",
        "import tpu_kernels.cli",
        "import tpu_kernels.doctor",
    ],
)
def test_import_is_light(statement: str) -> None:
    heavy = ("torch", "jax", "jaxlib", "transformers", "torch_tpu", "huggingface_hub", "numpy")
    script = f"{statement}\nimport sys\nassert not set({heavy!r}) & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
