"""The registry: its index, versions that were released, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from tpu_kernels.authoring import build_registry, stale
from tpu_kernels.errors import BuildError, VerificationError

VARIANT = "tpu-kernels/sample-kernel/v1/build/torch-tpu"


def set_version(source: Path, version: int) -> None:
    config = source / "build.toml"
    config.write_text(config.read_text().replace("version = 1", f"version = {version}"))


def test_the_index_names_versions_digests_and_aliases(source: Path, tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    build_registry(source.parent, registry)
    metadata = (registry / VARIANT / "metadata.json").read_bytes()
    assert json.loads((registry / "index.json").read_text()) == {
        "aliases": {"kernels-community/sample-kernel": "tpu-kernels/sample-kernel"},
        "kernels": {
            "tpu-kernels/sample-kernel": {
                "1": {
                    "metadata-sha256": hashlib.sha256(metadata).hexdigest(),
                    "path": "tpu-kernels/sample-kernel/v1",
                }
            }
        },
    }


def test_a_fresh_registry_is_not_stale_and_an_edit_makes_it_so(
    source: Path, package: Path, tmp_path: Path
) -> None:
    registry = tmp_path / "registry"
    assert "missing: index.json" in stale(source.parent, registry)
    build_registry(source.parent, registry)
    assert stale(source.parent, registry) == []
    (package / "late.py").write_text('WORD = "edited"\n')
    (package / "more.py").write_text("")
    (registry / "leftover").write_text("")
    assert stale(source.parent, registry) == [
        "changed: index.json",
        "left over: leftover",
        f"changed: {VARIANT}/late.py",
        f"changed: {VARIANT}/metadata.json",
        f"missing: {VARIANT}/more.py",
    ]
    (registry / "leftover").unlink()
    build_registry(source.parent, registry)
    assert stale(source.parent, registry) == []


def test_a_released_version_is_kept_as_it_is(source: Path, package: Path, tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    build_registry(source.parent, registry)
    released = (registry / VARIANT / "metadata.json").read_bytes()
    set_version(source, 2)
    (package / "late.py").write_text('WORD = "second"\n')
    build_registry(source.parent, registry)
    index = json.loads((registry / "index.json").read_text())
    assert sorted(index["kernels"]["tpu-kernels/sample-kernel"]) == ["1", "2"]
    assert (registry / VARIANT / "metadata.json").read_bytes() == released
    assert stale(source.parent, registry) == []


def test_a_released_version_that_was_changed_is_refused(source: Path, tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    build_registry(source.parent, registry)
    set_version(source, 2)
    (registry / VARIANT / "late.py").write_text('WORD = "changed"\n')
    with pytest.raises(VerificationError, match=r"changed: late\.py"):
        build_registry(source.parent, registry)


def test_a_kernel_without_a_source_is_dropped(source: Path, tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    build_registry(source.parent, registry)
    shutil.rmtree(source)
    build_registry(source.parent, registry)
    assert [path.name for path in registry.iterdir()] == ["index.json"]


def test_a_name_that_two_kernels_claim_is_refused(source: Path, tmp_path: Path) -> None:
    twin = Path(shutil.copytree(source, source.parent / "twin"))
    config = twin / "build.toml"
    config.write_text(
        config.read_text().replace('repo-id = "tpu-kernels/sample-kernel"', 'repo-id = "tpu-kernels/twin"')
    )
    with pytest.raises(BuildError, match="'kernels-community/sample-kernel' is a repo-id or alias twice"):
        build_registry(source.parent, tmp_path / "registry")
    assert not (tmp_path / "registry").exists()


def test_a_folder_that_is_no_registry_is_not_replaced(source: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("precious")
    with pytest.raises(BuildError, match="is no registry"):
        build_registry(source.parent, tmp_path / "home")
    assert (tmp_path / "home" / "thesis.txt").read_text() == "precious"


def test_sources_that_do_not_exist_are_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="is no folder of kernel sources"):
        build_registry(tmp_path / "nothing", tmp_path / "registry")
