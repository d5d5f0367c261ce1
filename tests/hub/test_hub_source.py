"""Kernels of the Hub: what is requested, what is fetched, what the cache serves, what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tpu_kernels
from tpu_kernels.errors import (
    ConfigurationError,
    IncompatibleKernelError,
    InvalidMetadataError,
    KernelNotFoundError,
    SourceUnavailableError,
    TpuKernelsError,
    VerificationError,
)
from tpu_kernels.testing import FakeHub, Fault

from .conftest import REPO, MakeSource, RunPython, Serve

LOAD = f"""
import tpu_kernels
kernel = tpu_kernels.get_kernel({REPO!r}, version=1, source="hub")
assert kernel.add(2, 3) == 5
assert kernel.table() == {{"tile": 128}}
"""
FOLDER = f"/kernels/{REPO}/resolve"
REFS = f"/api/kernels/{REPO}/refs"


def paths(server: FakeHub) -> list[str]:
    return [request.path for request in server.requests]


def cached(cache: Path) -> Path:
    """The one variant folder in a cache."""
    [variant] = cache.glob("kernels--*/snapshots/*/build/torch-tpu")
    return variant


def rewrite_metadata(server: FakeHub, **changes: object) -> None:
    path = server.root / REPO / "v1" / "build" / "torch-tpu" / "metadata.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def refs(commit: object) -> bytes:
    """The Hub's answer for a repository with the version 1 at `commit`."""
    branch = {"name": "v1", "ref": "refs/heads/v1", "targetCommit": commit}
    return json.dumps({"branches": [branch], "converts": [], "tags": []}).encode()


class TestLoading:
    def test_a_kernel_loads_and_only_its_variant_is_fetched(
        self, make_source: MakeSource, serve: Serve, tmp_path: Path
    ) -> None:
        server = serve(make_source())
        other = server.root / REPO / "v1" / "build" / "torch-cuda"
        other.mkdir()
        (other / "metadata.json").write_text("{}")
        kernel = tpu_kernels.get_kernel(REPO, version=1)
        assert (kernel.add(2, 3), kernel.table(), kernel.late()) == (5, {"tile": 128}, "verified")
        [loaded] = [loaded for loaded in tpu_kernels.get_loaded_kernels() if loaded.module is kernel]
        commit = server.commit(REPO)
        snapshot = tmp_path / "cache" / "kernels--tpu-kernels--sample-kernel" / "snapshots" / commit
        assert loaded.path == snapshot / "build" / "torch-tpu"
        assert loaded.address == f"{server.url}/kernels/{REPO}/tree/{commit}/build/torch-tpu"
        assert [entry.name for entry in (snapshot / "build").iterdir()] == ["torch-tpu"]
        assert not (snapshot / "README.md").exists()

    def test_a_loaded_kernel_costs_no_request(self, make_source: MakeSource, serve: Serve) -> None:
        server = serve(make_source())
        kernel = tpu_kernels.get_kernel(REPO, version=1)
        server.clear()
        assert tpu_kernels.get_kernel(REPO, version=1) is kernel
        assert not server.requests

    def test_a_cached_kernel_costs_one_request(
        self, make_source: MakeSource, serve: Serve, run_python: RunPython
    ) -> None:
        server = serve(make_source())
        run_python(LOAD, server)
        server.clear()
        run_python(LOAD, server)
        assert paths(server) == [REFS]

    def test_a_version_that_was_just_asked_for_costs_none(
        self, make_source: MakeSource, serve: Serve, run_python: RunPython
    ) -> None:
        server = serve(make_source(version=1), make_source(version=2))
        run_python(LOAD, server)
        server.clear()
        light = f"{LOAD}\nimport sys\nassert 'huggingface_hub.hf_api' not in sys.modules"
        assert run_python(light, server, TPU_KERNELS_FRESH="60") == ""
        # What tells that a version is fresh is the Hub's answer, not that the version was loaded.
        [ref] = (server.root.parent / "home" / "hub").glob("kernels--*/refs/v1")
        os.utime(ref, (time.time() - 100,) * 2)
        run_python(LOAD, server, TPU_KERNELS_FRESH="200")
        assert not server.requests
        run_python(LOAD, server, TPU_KERNELS_FRESH="60")
        assert paths(server) == [REFS]
        os.utime(ref, (time.time() + 10_000,) * 2)
        run_python(LOAD, server, TPU_KERNELS_FRESH="60")
        run_python(LOAD, server, TPU_KERNELS_FRESH="60")
        assert paths(server) == [REFS, REFS]

    def test_a_window_that_is_no_number_is_named(
        self, make_source: MakeSource, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        serve(make_source())
        monkeypatch.setenv("TPU_KERNELS_FRESH", "1h")
        with pytest.raises(ConfigurationError, match="TPU_KERNELS_FRESH='1h' is no number of seconds"):
            tpu_kernels.has_kernel(REPO, version=1)

    def test_a_cached_commit_costs_none(
        self, make_source: MakeSource, serve: Serve, run_python: RunPython
    ) -> None:
        server = serve(make_source())
        script = LOAD.replace("version=1", f"revision={server.commit(REPO)!r}")
        run_python(script, server)
        server.clear()
        run_python(script, server)
        assert not server.requests

    def test_branches_and_beginnings_of_commits_are_revisions(
        self, make_source: MakeSource, serve: Serve
    ) -> None:
        server = serve(make_source())
        shutil.copytree(server.root / REPO / "v1", server.root / REPO / "main")
        kernel = tpu_kernels.get_kernel(REPO, revision="main")
        assert tpu_kernels.get_kernel(REPO, revision="v1") is kernel
        assert tpu_kernels.get_kernel(REPO, revision="refs/heads/v1") is kernel
        assert not tpu_kernels.has_kernel(REPO, revision="nothing")

    def test_the_newest_version_is_the_default_and_an_older_one_is_told_of_it(
        self, make_source: MakeSource, serve: Serve, caplog: pytest.LogCaptureFixture
    ) -> None:
        serve(make_source(version=2), make_source(version=10))
        assert tpu_kernels.get_kernel(REPO).VERSION == 10
        assert tpu_kernels.get_kernel(REPO, version=2).VERSION == 2
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == 2
        assert f"pin it: get_kernel('{REPO}', version=10)" in messages[0]
        assert "there is a newer one: version=10" in messages[1]

    def test_a_missing_version_names_those_there_are(self, make_source: MakeSource, serve: Serve) -> None:
        server = serve(make_source())
        with pytest.raises(
            KernelNotFoundError, match=r"\(looked in: hub\); there is version 1: use version=1"
        ):
            tpu_kernels.get_kernel(REPO, version=3)
        assert paths(server) == [REFS]
        with pytest.raises(KernelNotFoundError, match="there is no kernel 'tpu-kernels/nothing'"):
            tpu_kernels.get_kernel("tpu-kernels/nothing", version=1)
        with pytest.raises(KernelNotFoundError, match=f"{REPO} has no commit {'0' * 40}"):
            tpu_kernels.get_kernel(REPO, revision="0" * 40)

    def test_broken_metadata_is_refused_before_anything_else_is_fetched(
        self, make_source: MakeSource, serve: Serve
    ) -> None:
        server = serve(make_source())
        rewrite_metadata(server, version="one")
        with pytest.raises(InvalidMetadataError, match="version: Input should be a valid integer"):
            tpu_kernels.get_kernel(REPO, version=1)
        assert {path.rpartition("/")[2] for path in paths(server) if FOLDER in path} == {"metadata.json"}

    def test_metadata_of_another_version_is_refused(self, make_source: MakeSource, serve: Serve) -> None:
        rewrite_metadata(serve(make_source()), version=7)
        with pytest.raises(InvalidMetadataError, match="it says 7 where version 1 was released"):
            tpu_kernels.get_kernel(REPO, version=1)

    def test_a_kernel_for_other_hardware_names_its_builds(
        self, make_source: MakeSource, serve: Serve
    ) -> None:
        build = serve(make_source()).root / REPO / "v1" / "build"
        (build / "torch-tpu").rename(build / "torch-cuda")
        with pytest.raises(IncompatibleKernelError, match="it has builds for: torch-cuda"):
            tpu_kernels.get_kernel(REPO, version=1)

    def test_explaining_fetches_the_metadata_alone(self, make_source: MakeSource, serve: Serve) -> None:
        server = serve(make_source())
        explanation = tpu_kernels.explain(REPO, version=1)
        assert str(explanation.decisions[0]) == (
            f"hub: {REPO} v1: accepted: the version asked for; the Hub calls tpu-kernels a trusted publisher"
        )
        assert {path.rpartition("/")[2] for path in paths(server) if FOLDER in path} == {"metadata.json"}

    def test_a_private_kernel_takes_the_token_of_the_user(
        self, make_source: MakeSource, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = serve(make_source())
        server.token = "hf_ours"
        monkeypatch.setenv("HF_TOKEN", "hf_theirs")
        assert not tpu_kernels.has_kernel(REPO, version=1)
        monkeypatch.setenv("HF_TOKEN", "hf_ours")
        assert tpu_kernels.has_kernel(REPO, version=1)

    def test_processes_that_load_at_once_do_not_meet(
        self, make_source: MakeSource, serve: Serve, run_python: RunPython
    ) -> None:
        server = serve(make_source())
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(run_python, LOAD, server) for _ in range(4)]:
                future.result()


class TestOffline:
    def test_what_was_loaded_by_its_version_loads_offline(
        self, make_source: MakeSource, serve: Serve, run_python: RunPython
    ) -> None:
        server = serve(make_source())
        run_python(LOAD, server)
        server.clear()
        assert run_python(LOAD, server, HF_HUB_OFFLINE="1") == ""
        assert not server.requests

    def test_an_unreachable_hub_is_replaced_by_the_cache_with_one_warning(
        self, make_source: MakeSource, serve: Serve, run_python: RunPython
    ) -> None:
        server = serve(make_source())
        run_python(LOAD, server)
        server.close()
        [warning] = run_python(f"{LOAD}\ntpu_kernels.explain({REPO!r})", server).splitlines()
        assert warning.endswith(f"; the cache serves {REPO} as it was last fetched")

    def test_a_busy_hub_is_not_waited_for_where_the_cache_has_a_copy(
        self, make_source: MakeSource, serve: Serve, run_python: RunPython
    ) -> None:
        server = serve(make_source())
        run_python(LOAD, server)
        server.clear()
        server.inject(Fault("/refs", status=503))
        assert "the cache serves" in run_python(LOAD, server)
        assert paths(server) == [REFS]

    def test_what_was_never_fetched_is_named(
        self, make_source: MakeSource, serve: Serve, run_python: RunPython
    ) -> None:
        server = serve(make_source())
        printed = run_python(
            f"import tpu_kernels\nprint(tpu_kernels.explain({REPO!r}))", server, HF_HUB_OFFLINE="1"
        )
        assert "(looked in: hub offline); there is: none" in printed
        server.close()
        with pytest.raises(
            SourceUnavailableError, match=rf"{REPO} was not looked up .*; the cache has no copy of it"
        ):
            tpu_kernels.get_kernel(REPO, version=1)
        assert not tpu_kernels.has_kernel(REPO, version=1)


class TestFaults:
    def test_a_busy_hub_is_asked_again_when_it_says(self, make_source: MakeSource, serve: Serve) -> None:
        server = serve(make_source())
        server.inject(Fault("/refs", status=429, headers={"Retry-After": "0"}, times=2))
        assert tpu_kernels.get_kernel(REPO, version=1).add(2, 3) == 5
        assert [request.status for request in server.requests[:3]] == [429, 429, 200]

    def test_a_hub_that_stays_busy_is_an_error_that_says_so(
        self, make_source: MakeSource, serve: Serve
    ) -> None:
        server = serve(make_source())
        server.inject(Fault("/refs", status=429, headers={"Retry-After": "0"}))
        with pytest.raises(SourceUnavailableError, match="429 Too Many Requests"):
            tpu_kernels.get_kernel(REPO, version=1)
        assert len(server.requests) == 3

    @pytest.mark.parametrize(
        "answer",
        [
            b"",
            b"[]",
            b"{}",
            b'{"branches": [{}]}',
            refs(7),
            refs("../../elsewhere"),
            refs("v1"),
            refs("0" * 40).replace(b'"v1"', b"null", 1),
            b"[" * 100_000,
        ],
    )
    def test_refs_that_make_no_sense_are_refused(
        self, make_source: MakeSource, serve: Serve, answer: bytes
    ) -> None:
        server = serve(make_source())
        server.inject(Fault("/refs", status=200, body=answer))
        with pytest.raises(SourceUnavailableError, match="makes no sense"):
            tpu_kernels.get_kernel(REPO, version=1)

    @pytest.mark.parametrize(
        "path", ["build/torch-tpu/../../../../../escaped.py", "/escaped.py", "build/torch-tpu/"]
    )
    def test_a_listing_that_leads_out_of_the_kernel_is_refused(
        self, make_source: MakeSource, serve: Serve, tmp_path: Path, path: str
    ) -> None:
        server = serve(make_source())
        entry = {"type": "file", "path": path, "oid": "0" * 40, "size": 1}
        server.inject(Fault("/tree/", status=200, body=json.dumps([entry]).encode()))
        with pytest.raises(TpuKernelsError):
            tpu_kernels.get_kernel(REPO, version=1)
        assert not list(tmp_path.rglob("escaped.py"))

    def test_a_cut_download_goes_on(self, make_source: MakeSource, serve: Serve) -> None:
        server = serve(make_source())
        server.inject(Fault("addition.py", cut=True, method="GET", times=1))
        assert tpu_kernels.get_kernel(REPO, version=1).add(2, 3) == 5
        downloads = [r for r in server.requests if "addition.py" in r.path and r.method == "GET"]
        assert [request.status for request in downloads] == [0, 200]

    def test_a_download_that_fails_leaves_nothing_half(
        self, make_source: MakeSource, serve: Serve, run_python: RunPython
    ) -> None:
        server = serve(make_source())
        server.inject(Fault("late.py", cut=True, method="HEAD"))
        failing = f"""
import tpu_kernels, tpu_kernels.errors, huggingface_hub.utils._http as http
http.time.sleep = lambda seconds: None
try:
    tpu_kernels.get_kernel({REPO!r}, version=1)
except tpu_kernels.errors.SourceUnavailableError as error:
    print("refused:", error)
"""
        assert f"refused: {REPO} was not downloaded (Hub: " in run_python(failing, server)
        # The metadata is there, and yet nothing loads by halves, nor is the version taken for fetched.
        offline = run_python(
            f"import tpu_kernels\nprint(tpu_kernels.explain({REPO!r}))", server, HF_HUB_OFFLINE="1"
        )
        assert "there is no kernel" in offline
        commit = server.commit(REPO)
        by_commit = failing.replace("version=1", f"revision={commit!r}")
        assert "refused:" in run_python(by_commit, server, HF_HUB_OFFLINE="1")
        server.clear()
        run_python(LOAD, server)

    def test_a_file_that_arrives_damaged_is_fetched_again(
        self, make_source: MakeSource, serve: Serve
    ) -> None:
        server = serve(make_source())
        right = (server.root / REPO / "v1" / "build" / "torch-tpu" / "late.py").read_bytes()
        flipped = bytes([right[0] ^ 1]) + right[1:]
        server.inject(Fault("late.py", method="GET", status=200, body=flipped, times=1))
        with pytest.raises(VerificationError, match=r"changed: late\.py\n.* load it again to download"):
            tpu_kernels.get_kernel(REPO, version=1)
        assert tpu_kernels.get_kernel(REPO, version=1).late() == "verified"

    def test_a_killed_download_leaves_nothing_half(
        self, make_source: MakeSource, serve: Serve, run_python: RunPython, tmp_path: Path
    ) -> None:
        server = serve(make_source())
        server.inject(Fault("addition.py", method="GET", delay=60))
        environment = {**os.environ, **server.environment(tmp_path / "home")}
        with subprocess.Popen([sys.executable, "-c", LOAD], env=environment) as process:
            while not any("addition.py" in r.path and r.method == "GET" for r in server.requests):
                assert process.poll() is None
                time.sleep(0.01)
            process.kill()
        server.clear()
        run_python(LOAD, server)


class TestVerification:
    def tamper(self, file: Path) -> None:
        """Changes the blob that a link of a snapshot leads to."""
        blob = file.resolve()
        blob.chmod(0o644)
        blob.write_bytes(blob.read_bytes() + b"\n")

    def test_a_cached_file_that_was_changed_is_refused_and_named(
        self, make_source: MakeSource, serve: Serve, run_python: RunPython, tmp_path: Path
    ) -> None:
        server = serve(make_source())
        run_python(LOAD, server)
        cache = tmp_path / "home" / "hub"
        self.tamper(cached(cache) / "late.py")
        printed = run_python(
            f"import tpu_kernels\ntry:\n    tpu_kernels.get_kernel({REPO!r}, version=1)\n"
            "except tpu_kernels.errors.VerificationError as error:\n    print(error)",
            server,
        )
        assert "are not the ones its commit lists:\n  changed: late.py\n" in printed
        assert "they were removed, load it again to download them\n" in printed
        run_python(LOAD, server)

    def test_metadata_that_was_changed_is_refused_and_fetched_again(
        self,
        make_source: MakeSource,
        serve: Serve,
        run_python: RunPython,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        server = serve(make_source())
        run_python(LOAD, server)
        cache = tmp_path / "home" / "hub"
        self.tamper(cached(cache) / "metadata.json")
        monkeypatch.setenv("KERNELS_CACHE", str(cache))
        with pytest.raises(VerificationError, match=r"changed: metadata\.json"):
            tpu_kernels.get_kernel(REPO, version=1)
        run_python(LOAD, server)

    def test_metadata_that_arrives_damaged_is_fetched_again(
        self, make_source: MakeSource, serve: Serve, run_python: RunPython
    ) -> None:
        server = serve(make_source())
        right = (server.root / REPO / "v1" / "build" / "torch-tpu" / "metadata.json").read_bytes()
        flipped = right.replace(b'"version": 1', b'"version": 2')
        server.inject(Fault("metadata.json", method="GET", status=200, body=flipped, times=1))
        with pytest.raises(VerificationError, match=r"changed: metadata\.json\n.* load it again to download"):
            tpu_kernels.get_kernel(REPO, version=1)
        assert tpu_kernels.get_kernel(REPO, version=1).late() == "verified"

    @pytest.mark.parametrize(
        ("name", "message"),
        [("metadata.json", "leads out of the cache"), ("late.py", r"late\.py is a symbolic link")],
    )
    def test_a_link_out_of_the_cache_is_refused(
        self,
        make_source: MakeSource,
        serve: Serve,
        run_python: RunPython,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        name: str,
        message: str,
    ) -> None:
        server = serve(make_source())
        run_python(LOAD, server)
        cache = tmp_path / "home" / "hub"
        link = cached(cache) / name
        outside = Path(shutil.copy(link, tmp_path))
        link.unlink()
        link.symlink_to(outside)
        monkeypatch.setenv("KERNELS_CACHE", str(cache))
        with pytest.raises(VerificationError, match=message):
            tpu_kernels.get_kernel(REPO, version=1)

    def test_a_build_that_its_digests_do_not_fit_is_refused(
        self, make_source: MakeSource, serve: Serve
    ) -> None:
        server = serve(make_source())
        (server.root / REPO / "v1" / "build" / "torch-tpu" / "late.py").write_text("WORD = 'swapped'\n")
        with pytest.raises(VerificationError, match=r"its metadata\.json lists:\n  changed: late\.py"):
            tpu_kernels.get_kernel(REPO, version=1)

    def test_without_digests_the_commit_vouches_for_the_files(
        self, make_source: MakeSource, serve: Serve
    ) -> None:
        """Digests are optional in the format of stock `kernels`."""
        server = serve(make_source())
        rewrite_metadata(server, digest=None, id="_sample_without_digests")
        assert tpu_kernels.get_kernel(REPO, version=1).late() == "verified"
