"""Caches: their size, and whether they can be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu_kernels.doctor import caches

from .conftest import by_subject


def test_they_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_KERNELS_CACHE", str(tmp_path / "ours"))
    (tmp_path / "ours" / "compile").mkdir(parents=True)
    (tmp_path / "ours" / "compile" / "0.json").write_text("{}")
    found = by_subject(caches.examine())
    assert {finding.level for finding in found.values()} == {"ok"}
    assert found["outcomes of compile"].message.startswith(f"{tmp_path}/ours/compile: 2 B, ")


def test_one_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "file" / "cache"))
    found = by_subject(caches.examine())["kernels of the Hub"]
    assert (found.level, "cannot be written" in found.message) == ("warning", True)


def test_a_disk_that_is_full_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "_LITTLE", 1 << 62)
    assert {finding.level for finding in caches.examine()} == {"warning"}
