"""An environment in which nothing is set that the doctor would speak of."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from tpu_kernels.doctor import Finding


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Takes away what this machine has set, and gives each test caches of its own."""
    for name in list(os.environ):
        if name.startswith(("TPU_", "HF_", "JAX_", "KERNELS_", "LOCAL_KERNELS", "DO_NOT_", "DISABLE_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "*")


def by_subject(findings: Iterable[Finding]) -> dict[str, Finding]:
    """The findings by what they are about."""
    return {finding.subject: finding for finding in findings}
