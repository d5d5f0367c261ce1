"""Self-tests: what passed before an upgrade is to be tried again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu_kernels.doctor import selftests

from .conftest import by_subject


def test_an_upgrade_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_KERNELS_CACHE", str(tmp_path))
    assert list(selftests.examine()) == []
    monkeypatch.setattr(selftests, "installed", {"libtpu": "1.0", "jax": "2.0"}.get)
    selftests.remember("acme/fast-norm")
    assert by_subject(selftests.examine())["acme/fast-norm"].level == "ok"
    monkeypatch.setattr(selftests, "installed", {"libtpu": "1.1", "jax": "2.0"}.get)
    found = by_subject(selftests.examine())["acme/fast-norm"]
    assert (found.level, found.message) == ("warning", "passed when libtpu was 1.0 and is 1.1")
    assert found.remedy.endswith("tpu-kernels selftest acme/fast-norm")
    (tmp_path / "selftest" / "acme--other.json").write_text("[]")
    assert len(list(selftests.examine())) == 1
