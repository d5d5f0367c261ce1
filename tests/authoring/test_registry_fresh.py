"""The registry in the repository is what building its kernel sources gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu_kernels.authoring import stale

REPOSITORY = Path(__file__).parents[2]
SOURCES = REPOSITORY / "kernels_src"
REGISTRY = REPOSITORY / "registry"


def test_the_shipped_registry_is_fresh() -> None:
    if not any(SOURCES.glob("*/build.toml")):
        pytest.skip("kernels_src holds no kernel, so there is no registry to compare")
    differences = stale(SOURCES, REGISTRY)
    assert not differences, (
        "the registry is stale; run: tpu-kernels build kernels_src --registry registry\n"
        + "\n".join(differences)
    )
