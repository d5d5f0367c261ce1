"""Publishing a kernel, to a registry and to a Hub, by the rules that versions have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tpu_kernels import has_kernel, install_kernel
from tpu_kernels.authoring import Publication, check, publish, yank
from tpu_kernels.authoring.checks import Finding, Outcome, Report
from tpu_kernels.errors import KernelNotFoundError, PublishError
from tpu_kernels.testing import FakeHub, Fault

REPO = "tpu-kernels/sample-kernel"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    (tmp_path / "hub").mkdir()
    with FakeHub(tmp_path / "hub", trusted=["acme"]) as hub:
        for name, value in {**hub.environment(tmp_path / "home"), "HF_TOKEN": "hf_of_a_test"}.items():
            monkeypatch.setenv(name, value)
        yield hub


@pytest.fixture(params=["folder", "hub"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """A place to publish to, and the repository that the sample kernel gets there."""
    if request.param == "folder":
        return str(tmp_path / "registry"), REPO
    request.getfixturevalue("hub")
    return "hub:acme/sample", "acme/sample"


def go(source: Path, to: str, *, dry_run: bool = False) -> Publication:
    """Publishes with the checks that take no time."""
    return publish(source, to, dry_run=dry_run, report=check(source, only=["layout", "lint"]))


def edit(source: Path, path: str, old: str, new: str) -> None:
    file = source / path
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def found(place: tuple[str, str], version: int) -> bool:
    to, repo_id = place
    source = "hub" if to.startswith("hub:") else to
    return has_kernel(repo_id, version=version, source=source, trust_remote_code=True, check_arch=False)


def test_the_life_of_a_version(source: Path, place: tuple[str, str]) -> None:
    to, repo_id = place
    assert not go(source, to, dry_run=True).done
    assert not found(place, 1)

    first = go(source, to)
    assert (first.repo_id, first.kind, first.done) == (repo_id, "new version", True)
    assert "build/torch-tpu/metadata.json" in first.added
    assert found(place, 1)
    assert go(source, to).kind == "unchanged"

    edit(source, "torch-ext/sample_kernel/late.py", "=", "=  ")
    (source / "torch-ext/sample_kernel/table.json").unlink()
    second = go(source, to)
    assert (second.kind, second.removed) == ("new revision", ("build/torch-tpu/table.json",))
    assert set(second.changed) == {"build/torch-tpu/late.py", "build/torch-tpu/metadata.json"}
    assert go(source, to).kind == "unchanged"

    edit(source, "build.toml", "version = 1", "version = 2")
    assert go(source, to).kind == "new version"
    assert found(place, 2)

    yank(REPO, 1, to)
    assert found(place, 1)
    yank(REPO, 1, to, dry_run=False)
    assert not found(place, 1)
    assert found(place, 2)
    with pytest.raises(KernelNotFoundError, match="nothing to take back"):
        yank(REPO, 1, to)


def test_what_is_published_is_verified_when_it_is_fetched(source: Path, hub: FakeHub) -> None:
    go(source, "hub:acme/sample")
    folder = install_kernel("acme/sample", version=1, source="hub")
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["provenance"]["kernel-builder"]["version"]


# What is edited, in which file, and what is then missed.
BROKEN = {
    "a function": ("torch-ext/sample_kernel/__init__.py", '"add", ', "", "add is gone"),
    "a generation": ("build.toml", '["v5e", "v6e"]', '["v6e"]', "generation v5e is gone"),
    "a dtype": ("build.toml", '["bfloat16", "float32"]', '["float32"]', "add does not take bfloat16"),
    "a gradient": ("build.toml", "differentiable = true", "", "add is not differentiable any more"),
    "a use": ("build.toml", "sample = ", "other = ", "cannot be used as transformers.experts sample"),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_changed_interface_wants_a_new_version(
    source: Path, tmp_path: Path, broken: tuple[str, str, str, str]
) -> None:
    path, old, new, reason = broken
    go(source, str(tmp_path / "registry"))
    edit(source, path, old, new)
    with pytest.raises(PublishError, match=rf"{reason}.*general.version to 2"):
        go(source, str(tmp_path / "registry"))
    edit(source, "build.toml", "version = 1", "version = 2")
    assert go(source, str(tmp_path / "registry")).kind == "new version"


def test_a_report_of_another_source_or_of_failures_publishes_nothing(source: Path, tmp_path: Path) -> None:
    report = check(source, only=["layout"])
    failed = Outcome("lint", "failed", (Finding("error", "too clever", "a.py", 3),))
    with pytest.raises(PublishError, match=r"check fails \(lint\), first with: error: a.py:3: too clever"):
        publish(source, str(tmp_path), report=Report(report.kernel, [failed], report.id))
    edit(source, "build.toml", "whole numbers", "any numbers")
    with pytest.raises(PublishError, match="check the source as it is now"):
        publish(source, str(tmp_path), report=report)


def test_a_version_is_on_the_hub_as_a_whole_or_not_at_all(source: Path, hub: FakeHub) -> None:
    for path in ("/branch/v1", "/commit/main"):
        hub.inject(Fault(path, status=500, method="POST", times=1))
        with pytest.raises(PublishError, match="500"):
            go(source, "hub:acme/sample")
        assert "v1" not in (hub.branches("acme/sample") or [])
    assert go(source, "hub:acme/sample").done
    assert found(("hub:acme/sample", "acme/sample"), 1)


def test_the_hub_wants_a_token(source: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(PublishError, match=r"acme/sample cannot be published: .*401"):
        go(source, "hub:acme/sample")
    assert not (hub.root / "acme").exists()
