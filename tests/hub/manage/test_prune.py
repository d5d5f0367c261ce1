"""Caches: what is listed, what a prune deletes, and what it must not."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tpu_kernels
from tpu_kernels.authoring import build_registry
from tpu_kernels.cli import app
from tpu_kernels.errors import ConfigurationError
from tpu_kernels.hub.manage.inventory import CachedItem, cached_items
from tpu_kernels.hub.manage.prune import prune
from tpu_kernels.testing import FakeHub

from ..conftest import REPO, MakeSource, RunPython, Serve

DOWNLOAD = f"""
from tpu_kernels.hub.configuration import configured_sources
from tpu_kernels.hub.manage.download import download
from tpu_kernels.hub.reference import Reference
from tpu_kernels.hub.trust import Trust
for version in {{versions}}:
    download(Reference({REPO!r}, version), configured_sources({{source!r}}, Trust()))
"""
LOAD = f"import tpu_kernels; print(tpu_kernels.get_kernel({REPO!r}, version={{version}}).add(1, 2))"
ENTRIES = "kernels--tpu-kernels--sample-kernel"

Fill = Callable[..., FakeHub]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the processes that a test starts, also in this one."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TPU_KERNELS_CACHE", str(tmp_path / "ours"))
    return tmp_path / "home" / "hub"


@pytest.fixture
def fill(
    make_source: MakeSource,
    serve: Serve,
    run_python: RunPython,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Fill:
    """Downloads versions of a kernel into the cache, by a process that has ended."""

    def fill(*versions: int) -> FakeHub:
        server = serve(*(make_source(version=version) for version in versions))
        run_python(DOWNLOAD.format(versions=versions, source="hub"), server)
        monkeypatch.setenv("KERNELS_CACHE", str(cache))
        return server

    return fill


def versions() -> list[int | None]:
    return [item.version for item in cached_items()]


def age(days: float, *paths: Path) -> None:
    """Makes files and what they lead to look unused for so long."""
    then = time.time() - days * 24 * 3600
    for path in paths:
        for file in [path, *path.rglob("*")]:
            os.utime(file, (then, then))


class TestListing:
    def test_commits_are_listed_with_their_versions(self, fill: Fill) -> None:
        server = fill(1, 2)
        found = {item.version: item for item in cached_items()}
        assert list(found) == [2, 1]
        assert found[1].revision == server.commit(REPO, "v1")
        variant = server.root / REPO / "v1" / "build"
        assert found[1].size == sum(file.stat().st_size for file in variant.rglob("*") if file.is_file())
        assert abs(found[1].last_used - time.time()) < 60

    def test_kernels_for_other_hardware_are_left_alone(self, fill: Fill, cache: Path) -> None:
        fill(1)
        [snapshot] = (cache / ENTRIES / "snapshots").iterdir()
        variant = snapshot / "build" / "torch-tpu"
        metadata = json.loads((variant / "metadata.json").read_text())
        (variant / "metadata.json").unlink()
        (variant / "metadata.json").write_text(json.dumps({**metadata, "backend": {"type": "cuda"}}))
        variant.rename(snapshot / "build" / "torch-cuda")
        assert cached_items() == []


class TestChoice:
    def test_the_newest_versions_are_spared(self, fill: Fill, cache: Path, run_python: RunPython) -> None:
        server = fill(1, 2, 3)
        report = prune(cached_items(), keep_latest=1)
        assert [item.version for item in report.removed] == [2, 1]
        assert versions() == [3]
        assert [path.name for path in (cache / ENTRIES / "refs").iterdir()] == ["v3"]
        assert len(list((cache / ENTRIES / "trees").iterdir())) == 1
        # Files that the versions share are still there.
        assert run_python(LOAD.format(version=3), server, HF_HUB_OFFLINE="1") == "3\n"
        assert run_python(LOAD.format(version=1), server).endswith("3\n")

    def test_what_was_used_is_spared(self, fill: Fill, cache: Path, run_python: RunPython) -> None:
        server = fill(1, 2)
        age(40, cache)
        run_python(LOAD.format(version=1), server)
        # Reading may count as a use, or may not, by how the disk is mounted; loading does.
        age(40, cache / ENTRIES)
        report = prune(cached_items(), older_than=timedelta(days=30))
        assert [item.version for item in report.removed] == [2]
        assert versions() == [1]

    def test_both_limits_have_to_allow_it(self, fill: Fill, cache: Path) -> None:
        fill(1, 2)
        assert not prune(cached_items(), older_than=timedelta(days=30), keep_latest=1).removed
        age(40, cache)
        report = prune(cached_items(), older_than=timedelta(days=30), keep_latest=1)
        assert [item.version for item in report.removed] == [1]

    def test_without_versions_the_repository_goes(self, fill: Fill, cache: Path) -> None:
        fill(1, 2)
        prune(cached_items(), keep_latest=0)
        assert not (cache / ENTRIES).exists()

    def test_a_dry_run_deletes_nothing(self, fill: Fill) -> None:
        fill(1, 2)
        report = prune(cached_items(), keep_latest=0, dry_run=True)
        assert [item.version for item in report.removed] == [2, 1]
        assert versions() == [2, 1]

    def test_a_limit_is_needed(self) -> None:
        with pytest.raises(ConfigurationError, match="nothing says what to prune"):
            prune([])

    def test_leftovers_go_after_a_day(self, fill: Fill, cache: Path, tmp_path: Path) -> None:
        fill(1)
        builds = tmp_path / "home" / "tpu-kernels" / "builds"
        (builds / ".download-abc" / "x").mkdir(parents=True)
        (cache / ENTRIES / "blobs" / "0123.incomplete").write_text("half")
        assert [item.leftover for item in cached_items()] == [True, True, False]
        assert not prune(cached_items(), older_than=timedelta(days=30)).removed
        age(2, builds, cache / ENTRIES / "blobs")
        assert len(prune(cached_items(), older_than=timedelta(days=30)).removed) == 2
        assert versions() == [1]


class TestUse:
    @contextlib.contextmanager
    def loaded(self, server: FakeHub, home: Path, version: int) -> Iterator[None]:
        """Another process that has loaded a version and goes on."""
        environment = {**os.environ, **server.environment(home)}
        environment.pop("KERNELS_CACHE", None)
        script = f"{LOAD.format(version=version)}\nimport sys; sys.stdout.flush(); sys.stdin.read()"
        with subprocess.Popen(
            [sys.executable, "-c", script], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"3\n"
            yield
            process.kill()

    def test_what_another_process_has_loaded_stays(self, fill: Fill, tmp_path: Path) -> None:
        server = fill(1, 2)
        with self.loaded(server, tmp_path / "home", 1):
            report = prune(cached_items(), keep_latest=0)
            assert [item.version for item in report.in_use] == [1]
            assert [item.version for item in report.removed] == [2]
        assert [item.version for item in prune(cached_items(), keep_latest=0).removed] == [1]

    def test_so_does_what_this_one_has(
        self, make_source: MakeSource, cache: Path, tmp_path: Path, run_python: RunPython, serve: Serve
    ) -> None:
        build_registry(make_source().parent, tmp_path / "registry")
        url = f"local://{tmp_path / 'registry'}"
        run_python(DOWNLOAD.format(versions=[1], source=url), serve())
        [item] = cached_items()
        assert (item.cache, item.kernel, item.version) == ("builds", "sample-kernel", 1)
        tpu_kernels.get_kernel(REPO, version=1, source=url)
        report = prune(cached_items(), keep_latest=0)
        assert (report.removed, report.in_use) == ((), (item_now(),))

    def test_builds_from_buckets_are_deleted(
        self, make_source: MakeSource, cache: Path, tmp_path: Path, run_python: RunPython, serve: Serve
    ) -> None:
        build_registry(make_source().parent, tmp_path / "registry")
        url = f"local://{tmp_path / 'registry'}"
        run_python(DOWNLOAD.format(versions=[1], source=url), serve())
        assert len(prune(cached_items(), keep_latest=0).removed) == 1
        assert not list((tmp_path / "home" / "tpu-kernels" / "builds").iterdir())

    def test_loads_go_on_while_it_prunes(self, fill: Fill, tmp_path: Path, run_python: RunPython) -> None:
        server = fill(1, 2)
        removed: list[CachedItem] = []
        with ThreadPoolExecutor(2) as pool:
            loads = [
                pool.submit(run_python, DOWNLOAD.format(versions=[1, 2, 1], source="hub"), server)
                for _ in range(6)
            ]
            while not all(load.done() for load in loads):
                removed += prune(cached_items(), keep_latest=0).removed
                time.sleep(0.02)
        for load in loads:
            load.result()  # fails with the process
        assert removed


class TestLinks:
    @pytest.mark.parametrize("keep_latest", [0, 1])
    @pytest.mark.parametrize("name", ["snapshots", "refs", "."])
    def test_nothing_outside_of_the_cache_is_deleted(
        self, fill: Fill, cache: Path, tmp_path: Path, name: str, keep_latest: int
    ) -> None:
        fill(1, 2)
        place, outside = cache / ENTRIES / name, tmp_path / "outside"
        place.rename(outside)
        (cache / ENTRIES / name).symlink_to(outside)
        before = sorted(outside.rglob("*"))
        prune(cached_items(), keep_latest=keep_latest)
        assert sorted(outside.rglob("*")) == before

    def test_a_link_that_leads_out_is_not_followed(self, fill: Fill, cache: Path, tmp_path: Path) -> None:
        fill(1, 2)
        outside = tmp_path / "outside.py"
        outside.write_text("")
        oldest = next(item for item in cached_items() if item.version == 1)
        link = oldest.path / "build" / "torch-tpu" / "late.py"
        link.unlink()
        link.symlink_to(outside)
        report = prune(cached_items(), keep_latest=1)
        assert (report.removed, [item.version for item in report.failed]) == ((), [1])
        assert outside.exists()


class TestCommand:
    def run(self, *arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["cache", *arguments])
        return result.exit_code, result.stdout

    def test_it_lists_sums_and_prunes(self, fill: Fill, cache: Path, tmp_path: Path) -> None:
        fill(1, 2)
        outcome = tmp_path / "ours" / "compile" / "0.json"
        outcome.parent.mkdir(parents=True)
        outcome.write_text("{}")
        code, printed = self.run("list", "--json")
        items = json.loads(printed)["items"]
        assert (code, [item["version"] for item in items]) == (0, [2, 1])
        caches = {entry["cache"]: entry for entry in json.loads(self.run("size", "--json")[1])["caches"]}
        assert caches["hub"] == {
            "cache": "hub",
            "path": str(cache),
            "size": sum(item["size"] for item in items),
        }
        assert caches["compile"]["size"] == 2
        code, printed = self.run("prune", "--older-than", "0d", "--keep-latest", "1", "--json")
        report = json.loads(printed)
        assert code == 0
        assert [(item["cache"], item["version"]) for item in report["removed"]] == [
            ("hub", 1),
            ("compile", None),
        ]
        assert not outcome.exists()

    @pytest.mark.parametrize("arguments", [[], ["--older-than", "old"], ["--keep-latest", "-1"]])
    def test_what_makes_no_sense_is_a_usage_error(self, arguments: list[str]) -> None:
        assert self.run("prune", *arguments)[0] == 2


def item_now() -> CachedItem:
    [item] = cached_items()
    return item
