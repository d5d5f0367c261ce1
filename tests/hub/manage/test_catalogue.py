"""`tpu-kernels list`, `versions` and `info`: what the sources have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tpu_kernels.authoring import build, build_registry
from tpu_kernels.cli import app
from tpu_kernels.hub import registry_root

from ..conftest import REPO, MakeSource, Serve, UseRegistry


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout


def run_json(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json")[1])


class TestList:
    def test_it_lists_every_source_that_can_be_listed(
        self, make_source: MakeSource, serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        server = serve(make_source(version=1), make_source(version=2))
        build(make_source(), tmp_path / "out")
        build_registry(make_source(version=7).parent, tmp_path / "ours")
        run("download", f"{REPO}@1")
        monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}={tmp_path / 'out'}")
        monkeypatch.setenv("TPU_KERNELS_SOURCES", f"local,registry,hub,{tmp_path / 'ours'}")
        server.clear()
        found = run_json("list")
        assert found["failures"] == []
        assert [
            (k["source"], k["versions"], k["alias-of"]) for k in found["kernels"] if k["kernel"] == REPO
        ] == [("local", [], None), ("hub cache", [1], None), (str(tmp_path / "ours"), [7], None)]
        aliases = [k["alias-of"] for k in found["kernels"] if k["kernel"] == "kernels-community/ragged-dot"]
        assert aliases == ["tpu-kernels/ragged-dot"]
        assert not server.requests

    def test_a_source_that_cannot_be_asked_is_named_and_the_others_listed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TPU_KERNELS_SOURCES", "memory://nothing,registry")
        found = run_json("list")
        assert [failure["source"] for failure in found["failures"]] == ["memory://nothing"]
        assert found["failures"][0]["error"]["kind"] == "KernelNotFoundError"
        assert found["kernels"]
        code, printed = run("list")
        assert (code, "tpu-kernels/ragged-dot" in printed) == (1, True)


class TestVersions:
    def test_the_one_that_would_load_is_marked(
        self, make_source: MakeSource, serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        server = serve(
            make_source(version=1),
            make_source(version=2, edit=("[tpu.requires]", '[tpu.requires]\nno-such-package = ">=7"')),
        )
        build_registry(make_source(version=7).parent, tmp_path / "ours")
        monkeypatch.setenv("TPU_KERNELS_SOURCES", f"hub,{tmp_path / 'ours'}")
        found = run_json("versions", REPO)
        assert [(v["source"], v["version"], v["commit"], v["taken"]) for v in found["versions"]] == [
            ("hub", 2, server.commit(REPO, "v2"), False),
            ("hub", 1, server.commit(REPO, "v1"), True),
            (str(tmp_path / "ours"), 7, None, False),
        ]
        assert run("versions", REPO)[0] == 0

    def test_those_of_an_untrusted_publisher_are_listed_too(
        self, make_source: MakeSource, serve: Serve
    ) -> None:
        serve(make_source(), trusted=[])
        found = run_json("versions", REPO)
        assert [(v["version"], v["taken"]) for v in found["versions"]] == [(1, False)]
        assert found["failures"][0]["error"]["kind"] == "UntrustedKernelError"
        assert run_json("versions", REPO, "--trust", "tpu-kernels")["versions"][0]["taken"]

    def test_none_has_an_exit_status(self, serve: Serve) -> None:
        serve()
        assert run("versions", "acme/nothing") == (1, "")


class TestInfo:
    def test_it_tells_what_the_kernel_says_about_itself(self, make_source: MakeSource, serve: Serve) -> None:
        server = serve(make_source())
        found = run_json("info", REPO)
        metadata = json.loads((server.root / REPO / "v1/build/torch-tpu/metadata.json").read_text())
        assert found["metadata"]["digest"] == metadata["digest"]
        assert found["metadata"]["tpu"]["provides"] == metadata["tpu"]["provides"]
        assert (found["repo-id"], found["source"], found["runs-here"]) == (REPO, "hub", True)
        assert (found["path"], found["size"]) == (None, None)
        assert found["card"]
        assert not any(request.path.endswith(".py") for request in server.requests)
        run("download", REPO)
        assert Path(run_json("info", REPO)["path"]).is_dir()

    def test_it_tells_about_what_does_not_run_here(
        self, make_source: MakeSource, use_registry: UseRegistry
    ) -> None:
        use_registry(make_source(edit=("[tpu.requires]", '[tpu.requires]\nno-such-package = ">=7"')))
        code, printed = run("info", f"{REPO}@1", "--json")
        found = json.loads(printed)
        assert (code, found["runs-here"]) == (1, False)
        assert found["unmet"] == ["needs no-such-package>=7, it is not installed"]
        assert "no: tpu-kernels/sample-kernel v1 needs no-such-package>=7" in run("info", REPO)[1]

    def test_the_shipped_kernel(self) -> None:
        code, printed = run("info", "tpu-kernels/ragged-dot", "--source", "registry")
        assert code == 0
        assert str(registry_root()) in printed.replace("\n", "")
        assert "tpu_ragged_dot" in printed
