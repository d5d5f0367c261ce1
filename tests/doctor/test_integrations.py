"""Loading a kernel for a try, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu_kernels.authoring import build_registry
from tpu_kernels.doctor import integrations

from .conftest import by_subject


def test_what_a_process_of_its_own_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_KERNELS_SOURCES", "registry")
    found = by_subject(integrations.examine(offline=True))
    assert (found["kernels"].level, found["transformers"].level) == ("ok", "ok")
    assert "tpu_grouped_mm, tpu_ragged_dot" in found["transformers"].message
    # transformers 5.24 takes a newer one than the one that is installed for these tests.
    assert found["stock kernels"].level == "warning"


def test_a_kernel_that_does_not_load_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build_registry(Path(__file__).parents[1] / "authoring", tmp_path / "other")
    monkeypatch.setenv("TPU_KERNELS_SOURCES", str(tmp_path / "other"))
    found = by_subject(integrations.examine(offline=True))
    assert (found["kernels"].level, "KernelNotFoundError" in found["kernels"].message) == (
        "problem",
        True,
    )
    assert found["transformers"].level == "warning"


def test_a_process_that_crashes_or_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrations, "__package__", "no_such_package")
    assert "No module named" in integrations._probe(offline=True)["kernel"]
    monkeypatch.setattr(integrations, "_DEADLINE", 0.01)
    assert integrations._probe(offline=True) == {"kernel": "it did not within 0.01 s"}
