"""Mirrors: from a Hub to a folder or bucket, then loading with no Hub."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tpu_kernels
from tpu_kernels.authoring import build_registry
from tpu_kernels.cli import app
from tpu_kernels.errors import (
    CopyError,
    InvalidMetadataError,
    KernelNotFoundError,
    UntrustedKernelError,
    VerificationError,
)
from tpu_kernels.hub import registry_root
from tpu_kernels.hub.configuration import configured_sources
from tpu_kernels.hub.manage.mirror import MirrorReport, mirror
from tpu_kernels.hub.reference import Reference
from tpu_kernels.hub.sources import RegistrySource
from tpu_kernels.hub.storage import Storage
from tpu_kernels.hub.trust import Trust
from tpu_kernels.testing import FakeHub

from ..conftest import REPO, MakeSource, Publish, Serve

VARIANT = "build/torch-tpu"


@pytest.fixture(params=["folder", "bucket"])
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where a mirror may be made, with an empty place to keep what is fetched from it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    return str(tmp_path / "mirror") if request.param == "folder" else f"memory://{uuid.uuid4().hex}"


def copy(target: str, *names: str, **options: object) -> MirrorReport:
    """A mirror from the Hub, as a process of its own would make it."""
    [source] = configured_sources("hub", Trust.of(options.pop("trust", False)))  # type: ignore[arg-type]
    return mirror([Reference.parse(name) for name in names or (REPO,)], target, source, **options)  # type: ignore[arg-type]


def tamper(target: str, path: str) -> None:
    storage = Storage(target)
    storage.write(path, (storage.read(path) or b"") + b"\n")


def rewrite_metadata(server: FakeHub, branch: str = "v1", **changes: object) -> None:
    path = server.root / REPO / branch / VARIANT / "metadata.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


class TestCopying:
    def test_a_kernel_loads_from_the_mirror_as_from_the_hub(
        self, make_source: MakeSource, serve: Serve, target: str, tmp_path: Path
    ) -> None:
        server = serve(make_source(version=1), make_source(version=2))
        report = copy(target)
        assert [(build.version, build.indexed, build.kept) for build in report.builds] == [
            (2, False, 0),
            (1, False, 0),
        ]
        server.close()
        shutil.rmtree(tmp_path / "cache")
        kernel = tpu_kernels.get_kernel(REPO, version=1, source=target)
        assert (kernel.add(2, 3), kernel.table(), kernel.late()) == (5, {"tile": 128}, "verified")
        assert tpu_kernels.get_kernel(REPO, source=target).VERSION == 2
        [loaded] = [loaded for loaded in tpu_kernels.get_loaded_kernels() if loaded.module is kernel]
        original = server.root / REPO / "v1" / VARIANT
        files = {file.relative_to(original) for file in original.rglob("*") if file.is_file()}
        assert all((loaded.path / file).read_bytes() == (original / file).read_bytes() for file in files)
        assert (
            Storage(target).read(f"{REPO}/v1/README.md") == (original.parents[1] / "README.md").read_bytes()
        )

    def test_only_what_is_new_is_copied(self, make_source: MakeSource, serve: Serve, target: str) -> None:
        server = serve(make_source(version=1))
        first = copy(target)
        again = copy(target)
        assert [(build.indexed, build.copied) for build in again.builds] == [(True, 0)]
        assert again.builds[0].kept == first.builds[0].copied
        build_registry(make_source(version=2).parent, server.root)
        added = copy(target)
        assert [(build.version, build.copied == 0) for build in added.builds] == [(2, False), (1, True)]

    def test_versions_are_chosen(self, make_source: MakeSource, serve: Serve, target: str) -> None:
        serve(*(make_source(version=version) for version in (1, 2, 3)))
        assert [build.version for build in copy(target, versions="newest").builds] == [3]
        assert [build.version for build in copy(target, versions=[1, 3]).builds] == [3, 1]
        assert [build.version for build in copy(target, f"{REPO}@2", versions="newest").builds] == [2]
        [failure] = copy(target, versions=[1, 7]).failures
        assert isinstance(failure.error, KernelNotFoundError)
        assert str(failure.error) == f"hub has no version 7 of {REPO}; it has versions: 3, 2, 1"

    def test_one_kernel_that_fails_does_not_hold_up_the_others(
        self, make_source: MakeSource, serve: Serve, target: str
    ) -> None:
        serve(make_source())
        report = copy(target, "tpu-kernels/nothing", REPO)
        assert [failure.kernel for failure in report.failures] == ["tpu-kernels/nothing, newest version"]
        assert tpu_kernels.has_kernel(REPO, version=1, source=target)

    def test_versions_for_other_hardware_are_passed_over_unless_named(
        self, make_source: MakeSource, serve: Serve, target: str
    ) -> None:
        server = serve(make_source(version=1), make_source(version=2))
        builds = server.root / REPO / "v2" / "build"
        (builds / "torch-tpu").rename(builds / "torch-cuda")
        report = copy(target, versions="newest")
        assert ([build.version for build in report.builds], report.skipped) == ([1], (f"{REPO} v2",))
        [failure] = copy(target, f"{REPO}@2").failures
        assert "has no build for TPUs" in str(failure.error)

    def test_a_build_that_does_not_run_here_is_copied(
        self, make_source: MakeSource, serve: Serve, target: str
    ) -> None:
        serve(make_source(edit=("[tpu.requires]", '[tpu.requires]\nno-such-package = ">=7"')))
        assert len(copy(target).builds) == 1
        assert "no-such-package>=7" in str(tpu_kernels.explain(REPO, version=1, source=target))

    def test_other_names_come_along(self, target: str) -> None:
        mirror([Reference("kernels-community/ragged-dot", 1)], target, RegistrySource(registry_root()))
        assert tpu_kernels.has_kernel("kernels-community/ragged-dot", version=1, source=target)

    def test_a_dry_run_writes_nothing(self, make_source: MakeSource, serve: Serve, target: str) -> None:
        serve(make_source())
        [plan] = copy(target, dry_run=True).builds
        assert (plan.indexed, plan.copied, plan.path) == (False, None, f"{REPO}/v1")
        assert Storage(target).read("index.json") is None
        copy(target)
        assert [build.indexed for build in copy(target, dry_run=True).builds] == [True]


class TestDependencies:
    def test_they_come_along(
        self, publish: Publish, serve: Serve, target: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("kernels")
        uses = "from kernels import get_kernel_dep\nbase = get_kernel_dep('tpu-kernels/base')"
        code = uuid.uuid4().hex
        publish("tpu-kernels/base", f"NUMBER = 1  # {code}", version=1)
        publish("tpu-kernels/base", f"NUMBER = 2  # {code}", version=2)
        publish(
            "tpu-kernels/top", f"{uses}\nNUMBER = base.NUMBER + 1  # {code}", depends={"tpu-kernels/base": 1}
        )
        server = serve()
        report = copy(target, "tpu-kernels/top")
        assert [(build.repo_id, build.version) for build in report.builds] == [
            ("tpu-kernels/top", 1),
            ("tpu-kernels/base", 1),
        ]
        server.close()
        monkeypatch.setenv("TPU_KERNELS_SOURCES", target)
        assert tpu_kernels.get_kernel("tpu-kernels/top", version=1).NUMBER == 2

    def test_one_that_no_mirror_can_have_is_told(self, publish: Publish, serve: Serve, target: str) -> None:
        depends = [{"repo-id": "tpu-kernels/base", "revision": "main"}]
        publish("tpu-kernels/top", "", **{"kernel-depends": depends})
        serve()
        [failure] = copy(target, "tpu-kernels/top").failures
        assert "depends on tpu-kernels/base, revision 'main'; a mirror holds versions" in str(failure.error)


class TestTrust:
    def test_it_is_asked_for_when_mirroring_and_not_when_reading(
        self, make_source: MakeSource, serve: Serve, target: str
    ) -> None:
        server = serve(make_source(), trusted=[])
        [failure] = copy(target).failures
        assert isinstance(failure.error, UntrustedKernelError)
        assert not any("/resolve/" in request.path for request in server.requests)
        copy(target, trust=["tpu-kernels"])
        assert tpu_kernels.get_kernel(REPO, version=1, source=target).add(1, 2) == 3


class TestVerification:
    def test_a_damaged_file_is_refused_by_readers_and_mended_by_mirroring_again(
        self, make_source: MakeSource, serve: Serve, target: str
    ) -> None:
        serve(make_source())
        copy(target)
        tamper(target, f"{REPO}/v1/{VARIANT}/late.py")
        Storage(target).write(f"{REPO}/v1/{VARIANT}/stray.py", b"")
        with pytest.raises(VerificationError, match=r"changed: late\.py"):
            tpu_kernels.get_kernel(REPO, version=1, source=target)
        assert [(build.indexed, build.copied) for build in copy(target).builds] == [(True, 1)]
        assert tpu_kernels.get_kernel(REPO, version=1, source=target).late() == "verified"

    def test_a_kernel_that_is_not_right_at_its_source_is_not_copied(
        self, make_source: MakeSource, serve: Serve, target: str
    ) -> None:
        server = serve(make_source())
        (server.root / REPO / "v1" / VARIANT / "late.py").write_text("WORD = 'swapped'\n")
        [failure] = copy(target).failures
        assert isinstance(failure.error, VerificationError)
        assert Storage(target).names("tpu-kernels") == []

    def test_a_build_without_digests_is_verified_by_the_index(
        self, make_source: MakeSource, serve: Serve, target: str
    ) -> None:
        """Digests are optional in the format of stock `kernels`."""
        rewrite_metadata(serve(make_source()), digest=None, id=f"_sample_{uuid.uuid4().hex}")
        copy(target)
        late = f"{REPO}/v1/{VARIANT}/late.py"
        right = Storage(target).read(late)
        assert right is not None
        tamper(target, late)
        with pytest.raises(VerificationError, match=r"changed: late\.py"):
            tpu_kernels.get_kernel(REPO, version=1, source=target)
        Storage(target).write(late, right)
        assert tpu_kernels.get_kernel(REPO, version=1, source=target).late() == "verified"

    def test_a_version_that_changed_is_put_beside_the_one_that_is_served(
        self, make_source: MakeSource, serve: Serve, target: str
    ) -> None:
        server = serve(make_source("EDITION = 1"))
        copy(target)
        before = Storage(target).read(f"{REPO}/v1/{VARIANT}/__init__.py")
        build_registry(make_source("EDITION = 2").parent, server.root)
        [build] = copy(target).builds
        assert build.path.startswith(f"{REPO}/v1-")
        assert Storage(target).read(f"{REPO}/v1/{VARIANT}/__init__.py") == before
        assert tpu_kernels.get_kernel(REPO, version=1, source=target).EDITION == 2
        assert [build.copied for build in copy(target).builds] == [0]


class TestInterruption:
    def test_wherever_it_stops_it_serves_nothing_half_and_goes_on_from_there(
        self, make_source: MakeSource, serve: Serve, target: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        serve(make_source())
        write = Storage.write
        for allowed in range(100):
            left = allowed

            def stopping(self: Storage, path: str, content: bytes) -> None:
                nonlocal left
                if not left:
                    raise KeyboardInterrupt
                left -= 1
                write(self, path, content)

            place = f"{target}-{allowed}"
            with monkeypatch.context() as patched:
                patched.setattr(Storage, "write", stopping)
                try:
                    copy(place)
                except KeyboardInterrupt:
                    pass
                else:
                    break
            assert not tpu_kernels.has_kernel(REPO, version=1, source=place)
            [build] = copy(place).builds
            assert build.kept == allowed
            assert tpu_kernels.get_kernel(REPO, version=1, source=place).add(2, 3) == 5
        assert allowed > 5

    def test_a_killed_process_leaves_nothing_half(
        self, make_source: MakeSource, serve: Serve, tmp_path: Path
    ) -> None:
        serve(make_source())
        script = f"""
import os, signal
from pathlib import Path
from tpu_kernels.hub.configuration import configured_sources
from tpu_kernels.hub.manage.mirror import mirror
from tpu_kernels.hub.reference import Reference
from tpu_kernels.hub.trust import Trust
replace, left = Path.replace, 4
def dying(self, target):
    global left
    left -= "mirror" in str(target)
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(self, target)
[source] = configured_sources("hub", Trust())
source.find(Reference({REPO!r}))
Path.replace = dying
mirror([Reference({REPO!r})], {str(tmp_path / "mirror")!r}, source)
"""
        process = subprocess.run([sys.executable, "-c", script], env=dict(os.environ), timeout=60)
        assert process.returncode == -signal.SIGKILL
        assert [path for path in (tmp_path / "mirror").rglob(".*") if path.is_file()]
        assert not tpu_kernels.has_kernel(REPO, version=1, source=tmp_path / "mirror")
        [build] = copy(str(tmp_path / "mirror")).builds
        assert build.kept == 3
        assert tpu_kernels.get_kernel(REPO, version=1, source=tmp_path / "mirror").late() == "verified"

    def test_a_place_that_cannot_be_written_is_named(
        self, make_source: MakeSource, serve: Serve, tmp_path: Path
    ) -> None:
        serve(make_source())
        (tmp_path / "file").write_text("")
        with pytest.raises(CopyError, match="/file cannot be written"):
            copy(str(tmp_path / "file"))


class TestIndex:
    def test_what_others_put_there_stays(self, make_source: MakeSource, serve: Serve, target: str) -> None:
        mirror([Reference("tpu-kernels/ragged-dot")], target, RegistrySource(registry_root()))
        index = json.loads(Storage(target).read("index.json") or b"")
        Storage(target).write("index.json", json.dumps({**index, "of-a-newer-release": [1]}).encode())
        serve(make_source())
        copy(target)
        after = json.loads(Storage(target).read("index.json") or b"")
        assert after["of-a-newer-release"] == [1]
        assert sorted(after["kernels"]) == ["tpu-kernels/ragged-dot", REPO]

    def test_one_that_cannot_be_read_is_refused(
        self, make_source: MakeSource, serve: Serve, target: str
    ) -> None:
        serve(make_source())
        Storage(target).write("index.json", b'{"kernels": []}')
        with pytest.raises(InvalidMetadataError, match=r"index\.json: kernels: "):
            copy(target)

    def test_writers_to_one_folder_wait_for_each_other(
        self, make_source: MakeSource, serve: Serve, tmp_path: Path
    ) -> None:
        serve(*(make_source(version=version) for version in range(1, 5)))
        target = str(tmp_path / "mirror")
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(copy, target, f"{REPO}@{version}") for version in range(1, 5)]:
                assert not future.result().failures
        assert RegistrySource(tmp_path / "mirror").versions(REPO) == [4, 3, 2, 1]


class TestCommand:
    def test_it_tells_what_it_did(self, make_source: MakeSource, serve: Serve, tmp_path: Path) -> None:
        serve(make_source())
        arguments = ["mirror", REPO, "acme/nothing", "--to", str(tmp_path / "mirror"), "--json"]
        planned = json.loads(CliRunner().invoke(app, [*arguments, "--dry-run"]).stdout)
        assert [(build["repo-id"], build["copied"]) for build in planned["builds"]] == [(REPO, None)]
        result = CliRunner().invoke(app, arguments)
        report = json.loads(result.stdout)
        assert (result.exit_code, report["target"]) == (1, str(tmp_path / "mirror"))
        assert [build["version"] for build in report["builds"]] == [1]
        assert [failure["error"]["kind"] for failure in report["failures"]] == ["KernelNotFoundError"]
        result = CliRunner().invoke(app, ["mirror", REPO, "--to", str(tmp_path / "mirror")])
        assert (result.exit_code, "is there" in result.stdout) == (0, True)

    def test_a_choice_of_versions_that_makes_no_sense_is_a_usage_error(self, tmp_path: Path) -> None:
        arguments = ["mirror", REPO, "--to", str(tmp_path / "mirror"), "--versions", "some"]
        assert CliRunner().invoke(app, arguments).exit_code == 2
