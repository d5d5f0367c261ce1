"""`tpu-kernels download` and `verify`: what is fetched, and whether it is still right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tpu_kernels
from tpu_kernels.authoring import build, build_registry
from tpu_kernels.cli import app
from tpu_kernels.hub import registry_root
from tpu_kernels.testing import Fault

from ..conftest import REPO, MakeSource, Publish, Serve, UseRegistry


def run(*arguments: str) -> tuple[int, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


class TestDownload:
    def test_kernels_are_there_and_verified_and_not_loaded(
        self, make_source: MakeSource, serve: Serve
    ) -> None:
        server = serve(make_source("raise RuntimeError('it ran')"), make_source(version=2))
        code, found = run("download", f"{REPO}@1", REPO)
        assert (code, [kernel["version"] for kernel in found["kernels"]]) == (0, [1, 2])
        assert all((Path(kernel["path"]) / "late.py").is_file() for kernel in found["kernels"])
        server.clear()
        run("download", REPO, "--version", "1")
        assert [request.path for request in server.requests] == [f"/api/kernels/{REPO}/refs"]

    def test_what_they_depend_on_comes_along(self, publish: Publish, serve: Serve, tmp_path: Path) -> None:
        publish("tpu-kernels/base", "")
        publish("tpu-kernels/top", "", depends={"tpu-kernels/base": 1})
        serve()
        code, found = run("download", "tpu-kernels/top", "--to", str(tmp_path / "out"))
        names = [kernel["repo-id"] for kernel in found["kernels"]]
        assert (code, names) == (0, ["tpu-kernels/base", "tpu-kernels/top"])
        assert (tmp_path / "out/tpu-kernels/base/build/torch-tpu/__init__.py").is_file()

    def test_one_that_fails_does_not_hold_up_the_others(self, make_source: MakeSource, serve: Serve) -> None:
        serve(make_source())
        code, found = run("download", "acme/nothing", REPO)
        assert (code, len(found["kernels"])) == (1, 1)
        assert found["failures"][0]["error"]["kind"] == "KernelNotFoundError"

    def test_an_interrupted_one_goes_on(self, make_source: MakeSource, serve: Serve) -> None:
        server = serve(make_source())
        server.inject(Fault("late.py", method="HEAD", status=403))
        assert run("download", REPO)[0] == 1
        fetched = {request.path for request in server.requests if request.method == "GET"}
        server.clear()
        assert run("download", REPO)[0] == 0
        again = {r.path for r in server.requests if r.method == "GET" and "/resolve/" in r.path}
        assert again
        assert not again & fetched

    def test_it_puts_them_where_local_kernels_takes_them(
        self, make_source: MakeSource, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = serve(make_source())
        run("download", REPO, "--to", str(tmp_path / "out"))
        run("download", REPO, "--to", str(tmp_path / "out"))
        server.close()
        monkeypatch.setenv("TPU_KERNELS_SOURCES", "local")
        monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}={tmp_path / 'out' / REPO}")
        assert tpu_kernels.get_kernel(REPO, version=1).add(1, 2) == 3
        assert run("verify", str(tmp_path / "out" / REPO))[0] == 0


class TestVerify:
    def test_what_the_hub_s_cache_holds(self, make_source: MakeSource, serve: Serve) -> None:
        server = serve(make_source(version=1), make_source(version=2))
        run("download", f"{REPO}@1", f"{REPO}@2")
        server.close()
        code, found = run("verify", REPO)
        assert (code, [b["violations"] for b in found["builds"]]) == (0, [[], []])
        folder = Path(next(b["path"] for b in found["builds"] if b["version"] == 1))
        blob = (folder / "__init__.py").resolve()
        blob.chmod(0o644)
        blob.write_bytes(blob.read_bytes() + b"\n")
        (folder / "late.py").unlink()
        (folder / "stray.py").write_text("")
        code, found = run("verify")
        wrong = {b["version"]: b["violations"] for b in found["builds"] if b["violations"]}
        assert (code, wrong) == (1, {1: ["missing: late.py", "changed: __init__.py", "not listed: stray.py"]})

    def test_what_came_from_a_bucket(
        self, make_source: MakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "cache"))
        build_registry(make_source().parent, tmp_path / "ours")
        mirror = f"local://{tmp_path / 'mirror'}"
        run("mirror", REPO, "--from", str(tmp_path / "ours"), "--to", mirror)
        for source in (f"local://{tmp_path / 'ours'}", mirror):
            run("download", REPO, "--source", source)
        code, found = run("verify", REPO)
        assert (code, [b["place"] for b in found["builds"]]) == (0, ["bucket cache", "bucket cache"])
        for checked in found["builds"]:
            Path(checked["path"], "late.py").write_text("WORD = 'swapped'\n")
        code, found = run("verify", REPO)
        assert (code, [b["violations"] for b in found["builds"]]) == (1, [["changed: late.py"]] * 2)

    def test_a_registry_and_a_kernel_in_a_folder(self, make_source: MakeSource, tmp_path: Path) -> None:
        registry = shutil.copytree(registry_root(), tmp_path / "registry")
        assert run("verify", str(registry))[0] == 0
        (registry / "tpu-kernels/ragged-dot/v1/build/torch-tpu/metadata.json").write_text("{}")
        code, found = run("verify", str(registry))
        assert code == 1
        [(kernel, violations)] = [(b["kernel"], b["violations"]) for b in found["builds"] if b["violations"]]
        assert kernel == "tpu-kernels/ragged-dot"
        assert "is not the one that the registry's index promises" in violations[0]
        build(make_source(), tmp_path / "out")
        assert run("verify", str(tmp_path / "out"))[0] == 0
        (tmp_path / "out/build/torch-tpu/late.py").unlink()
        assert run("verify", str(tmp_path / "out"))[1]["builds"][0]["violations"] == ["missing: late.py"]

    def test_what_local_kernels_names(
        self, make_source: MakeSource, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        serve()
        monkeypatch.setenv("TPU_KERNELS_SOURCES", "local")
        build(make_source(), tmp_path / "out")
        monkeypatch.setenv("LOCAL_KERNELS", f"acme/ours={tmp_path / 'out'}:acme/gone={tmp_path / 'gone'}")
        code, found = run("verify", "acme/ours")
        assert (code, [(b["kernel"], b["version"]) for b in found["builds"]]) == (0, [("acme/ours", 1)])
        code, found = run("verify")
        assert (code, ["holds no built kernel" in v for b in found["builds"] for v in b["violations"]]) == (
            1,
            [True],
        )

    def test_what_is_shipped(self, make_source: MakeSource, use_registry: UseRegistry) -> None:
        use_registry(make_source())
        code, found = run("verify", REPO)
        assert (code, [b["place"] for b in found["builds"]]) == (0, ["registry"])

    def test_nothing_to_verify_is_an_error(self, serve: Serve) -> None:
        serve()
        result = CliRunner().invoke(app, ["verify", "acme/nothing"])
        assert "nothing of acme/nothing is on this machine" in str(result.exception)
        result = CliRunner().invoke(app, ["verify", "./nothing"])
        assert "nothing holds no built kernel" in str(result.exception)
