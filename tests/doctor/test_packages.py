"""Packages that are installed, missing, or out of range."""

from __future__ import annotations

import importlib.metadata

import pytest

from tpu_kernels.doctor import packages

from .conftest import by_subject


def set_versions(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name not in versions:
            return real(name)
        if (found := versions[name]) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_what_is_installed_here_is_in_range() -> None:
    found = by_subject(packages.examine())
    assert {finding.level for finding in found.values()} == {"ok"}
    assert found["jax"].message.startswith(f"{importlib.metadata.version('jax')} (")
    assert "<5.25" in found["transformers"].message


def test_what_is_out_of_range_or_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    set_versions(monkeypatch, torch="2.1.0", transformers="4.0", jax=None, diffusers=None)
    found = by_subject(packages.examine())
    levels = {name: found[name].level for name in ("torch", "transformers", "jax", "diffusers")}
    assert levels == {
        "torch": "problem",
        "transformers": "warning",
        "jax": "problem",
        "diffusers": "ok",
    }
    assert found["jax"].remedy == "pip install 'jax>=0.10'"
    assert "tpu-kernels[diffusers]" in found["diffusers"].message


def test_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_DISTRIBUTION", "no-such-package")
    found = by_subject(packages.examine())
    assert found["no-such-package"].level == "warning"
    assert found["torch"].level == "ok"
