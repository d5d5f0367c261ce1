"""Variables that are set, mean nothing, or cannot be read."""

from __future__ import annotations

import importlib.metadata

import pytest

from tpu_kernels.doctor import environment, sources

from .conftest import by_subject


def test_what_is_set_is_told_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:secret@hub.example")
    found = by_subject(environment.examine())
    assert set(found) == {"HF_TOKEN", "HF_ENDPOINT", "KERNELS_CACHE"}
    assert not any("secret" in finding.message for finding in found.values())
    assert found["HF_ENDPOINT"].message == "https://...@hub.example: the Hub's address"


def test_what_means_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_KERNELS_SOURCE", "registry")
    monkeypatch.setenv("TPU_KERNELS_LOG", "loud")
    found = by_subject(environment.examine())
    assert found["TPU_KERNELS_SOURCE"].remedy == "did you mean TPU_KERNELS_SOURCES?"
    assert [f.level for f in environment.examine() if f.subject == "TPU_KERNELS_LOG"] == ["ok", "warning"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("TPU_KERNELS_SOURCES", "hubb"), ("TPU_KERNELS_TRUST", "a b"), ("LOCAL_KERNELS", "x")],
)
def test_what_cannot_be_read_is_a_problem(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    found = by_subject(environment.examine())["configuration"]
    assert (found.level, name in found.message) == ("problem", True)
    assert list(sources.examine(offline=True)) == []


def test_stock_kernels_and_a_user_who_is_not_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert importlib.metadata.version("kernels") == "0.17.2"
    monkeypatch.setenv("DO_NOT_TRACK", "1")
    levels = [f.level for f in environment.examine() if f.subject == "DO_NOT_TRACK"]
    assert levels == ["ok", "warning"]
