"""Locks: what is written, what stock reads of it, and that a locked kernel is that build or an error."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

import tpu_kernels
from tpu_kernels.authoring import build_registry
from tpu_kernels.cli import app
from tpu_kernels.cli.lock import lock
from tpu_kernels.errors import (
    ConfigurationError,
    KernelNotFoundError,
    LockError,
    SourceUnavailableError,
    UntrustedKernelError,
    VerificationError,
)
from tpu_kernels.hub.configuration import configured_sources
from tpu_kernels.hub.lock import read_lock
from tpu_kernels.hub.trust import Trust
from tpu_kernels.testing import FakeHub

from .conftest import REPO, MakeSource, Publish, RunPython, Serve, UseRegistry

OTHER, BASE = "acme/other", "acme/base"

WriteProject = Callable[..., Path]


@pytest.fixture
def write_project(tmp_path: Path) -> WriteProject:
    """A project that asks for kernels."""

    def write(**dependencies: int) -> Path:
        project = tmp_path / "project"
        project.mkdir(exist_ok=True)
        lines = [
            f'"{name.replace("__", "/").replace("_", "-")}" = {version}'
            for name, version in dependencies.items()
        ]
        table = "\n".join(["[tool.kernels.dependencies]", *lines])
        (project / "pyproject.toml").write_text(f'[project]\nname = "demo"\n\n{table}\n')
        return project

    return write


def run(project: Path, *options: str) -> str:
    """`tpu-kernels lock PROJECT`, which has to succeed."""
    app = typer.Typer()
    app.command()(lock)
    result = CliRunner().invoke(app, [str(project), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def check(project: Path) -> list[str]:
    app = typer.Typer()
    app.command()(lock)
    result = CliRunner().invoke(app, [str(project), "--check", "--json"], catch_exceptions=False)
    problems = json.loads(result.output)["problems"]
    assert result.exit_code == (1 if problems else 0)
    assert isinstance(problems, list)
    return problems


def commits(project: Path) -> dict[str, str]:
    entries = json.loads((project / "kernels.lock").read_text())
    return {entry["dependency"]["repo-id"]: entry["lock"]["commit"] for entry in entries}


class TestWriting:
    def test_commits_and_digests_are_written_and_fit(
        self, make_source: MakeSource, serve: Serve, write_project: WriteProject
    ) -> None:
        server = serve(make_source())
        project = write_project(tpu_kernels__sample_kernel=1)
        assert f"{REPO}, version 1: {server.commit(REPO)}, torch-tpu" in run(project)
        assert commits(project) == {REPO: server.commit(REPO)}
        [kernel] = read_lock(project / "kernels.lock").kernels
        variant = server.root / REPO / "v1" / "build" / "torch-tpu"
        digests = json.loads((variant / "metadata.json").read_text())["digest"]["files"]
        assert kernel.builds["torch-tpu"].files == digests
        assert check(project) == []

    def test_stock_reads_it_and_loads_by_it(
        self, publish: Publish, serve: Serve, run_stock: RunPython, write_project: WriteProject
    ) -> None:
        publish(BASE, "NUMBER = 1")
        publish(
            OTHER,
            f"from kernels import get_kernel_dep\nNUMBER = get_kernel_dep({BASE!r}).NUMBER",
            depends={BASE: 1},
        )
        server = serve(trusted=["acme"])
        file = project = write_project(acme__other=1)
        run(project)
        file = project / "kernels.lock"
        assert set(commits(project)) == {OTHER, BASE}
        script = f"""
from pathlib import Path
import kernels
assert kernels.get_locked_kernel({OTHER!r}, lockfile=Path({str(file)!r})).NUMBER == 1
assert kernels.load_kernel({OTHER!r}, lockfile=Path({str(file)!r})).NUMBER == 1
"""
        run_stock(script, server)

    def test_what_is_locked_stays_until_it_is_upgraded(
        self, publish: Publish, serve: Serve, write_project: WriteProject
    ) -> None:
        for repo_id in (BASE, OTHER):
            publish(repo_id, "NUMBER = 1")
        serve(trusted=["acme"])
        project = write_project(acme__base=1, acme__other=1)
        run(project)
        first = commits(project)
        for repo_id in (BASE, OTHER):
            publish(repo_id, "NUMBER = 2")
        run(project)
        assert commits(project) == first
        run(project, "--upgrade-kernel", OTHER)
        second = commits(project)
        assert (first[BASE] == second[BASE], first[OTHER] == second[OTHER]) == (True, False)
        run(project, "--upgrade")
        assert commits(project)[BASE] != first[BASE]

    def test_the_check_names_what_does_not_fit(
        self, publish: Publish, serve: Serve, write_project: WriteProject
    ) -> None:
        publish(BASE, "")
        publish(OTHER, "", depends={BASE: 1})
        serve(trusted=["acme"])
        project = write_project(acme__other=1)
        run(project)
        assert check(project) == []
        write_project(acme__more=2)
        assert check(project) == [
            "not locked: acme/more, version 2",
            f"locked, but not asked for: {OTHER}, version 1",
            f"locked, but not asked for: {BASE}, version 1",
        ]
        write_project(acme__base=1)
        run(project)
        assert commits(project).keys() == {BASE}
        (project / "tpu-kernels.lock").unlink()
        assert check(project) == [f"locked without digests: {BASE}, version 1"]

    def test_a_kernel_that_the_user_trusts_can_be_locked_and_then_loads(
        self, publish: Publish, serve: Serve, write_project: WriteProject
    ) -> None:
        publish(OTHER, "NUMBER = 3")
        serve(trusted=[])
        project = write_project(acme__other=1)
        with pytest.raises(UntrustedKernelError):
            run(project)
        assert not (project / "kernels.lock").exists()
        run(project, "--trust", OTHER)
        assert tpu_kernels.get_locked_kernel(OTHER, lockfile=project / "kernels.lock").NUMBER == 3

    def test_a_kernel_of_a_registry_is_locked_by_its_content(
        self, make_source: MakeSource, use_registry: UseRegistry, write_project: WriteProject
    ) -> None:
        registry = use_registry(make_source("PLACE = 1"))
        project = write_project(kernels_community__sample_kernel=1)
        assert "from a registry" in run(project)
        assert json.loads((project / "kernels.lock").read_text()) == []
        assert check(project) == []
        file = project / "kernels.lock"
        assert tpu_kernels.load_kernel("kernels-community/sample-kernel", lockfile=file).PLACE == 1
        build_registry(make_source("PLACE = 2").parent, registry)
        with pytest.raises(
            VerificationError, match="holds another one; to take that, run: tpu-kernels lock --upgrade"
        ):
            tpu_kernels.get_locked_kernel("kernels-community/sample-kernel", lockfile=file)

    def test_a_lock_that_stock_wrote_is_completed(
        self, publish: Publish, serve: Serve, write_project: WriteProject
    ) -> None:
        publish(OTHER, "NUMBER = 4")
        server = serve(trusted=["acme"])
        project = write_project(acme__other=1)
        entry = {"dependency": {"repo-id": OTHER, "version": 1}, "lock": {"commit": server.commit(OTHER)}}
        (project / "kernels.lock").write_text(json.dumps([entry]))
        assert tpu_kernels.get_locked_kernel(OTHER, lockfile=project / "kernels.lock").NUMBER == 4
        run(project)
        [kernel] = read_lock(project / "kernels.lock").kernels
        assert (kernel.commit, list(kernel.builds)) == (server.commit(OTHER), ["torch-tpu"])

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", r"asks for no kernels; add: \[tool\.kernels\.dependencies\]"),
            ("[tool.kernels.dependencies]\nrelu = 1", "'relu' names no kernel"),
            ('[tool.kernels.dependencies]\n"a/b" = "1"', "version='1' is no kernel version"),
            ("[tool", r"pyproject\.toml: "),
            ("tool = 1", r"pyproject\.toml: "),
        ],
    )
    def test_a_project_that_asks_for_nothing_readable_is_named(
        self, tmp_path: Path, text: str, message: str
    ) -> None:
        (tmp_path / "pyproject.toml").write_text(text)
        with pytest.raises(LockError, match=message):
            run(tmp_path)
        with pytest.raises(LockError, match="cannot be read"):
            run(tmp_path / "nowhere")


@pytest.fixture
def locked(make_source: MakeSource, serve: Serve, write_project: WriteProject) -> tuple[FakeHub, Path]:
    """A Hub with one kernel, and a project whose lock holds it."""
    server = serve(make_source("PLACE = 'locked'"))
    project = write_project(tpu_kernels__sample_kernel=1)
    run(project)
    server.clear()
    return server, project / "kernels.lock"


class TestLoading:
    def test_a_locked_kernel_that_is_here_costs_no_request(self, locked: tuple[FakeHub, Path]) -> None:
        server, file = locked
        assert tpu_kernels.load_kernel(REPO, lockfile=file).PLACE == "locked"
        assert not server.requests

    def test_what_is_not_here_is_fetched_by_one_function_and_not_by_the_other(
        self, locked: tuple[FakeHub, Path], tmp_path: Path
    ) -> None:
        server, file = locked
        shutil.rmtree(tmp_path / "cache")
        with pytest.raises(SourceUnavailableError, match="is not in the cache"):
            tpu_kernels.load_kernel(REPO, lockfile=file)
        assert not server.requests
        assert tpu_kernels.get_locked_kernel(REPO, lockfile=file).PLACE == "locked"
        assert not [request for request in server.requests if "/refs" in request.path]

    def test_get_kernel_takes_what_is_locked(
        self,
        locked: tuple[FakeHub, Path],
        make_source: MakeSource,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        server, file = locked
        build_registry(make_source("PLACE = 'newer'").parent, server.root)
        build_registry(make_source("PLACE = 'v2'", version=2).parent, server.root)
        monkeypatch.setenv("TPU_KERNELS_LOCK", str(file))
        monkeypatch.setenv("TPU_KERNELS_SOURCES", "lock,hub")
        assert tpu_kernels.get_kernel(REPO, version=1).PLACE == "locked"
        assert tpu_kernels.get_kernel(REPO).PLACE == "locked"
        assert not caplog.records
        assert not server.requests
        assert f"{file} locks it; from the hub" in str(tpu_kernels.explain(REPO))
        assert tpu_kernels.get_kernel(REPO, version=2).PLACE == "v2"
        assert not tpu_kernels.has_kernel(REPO, version=2, source="lock")
        monkeypatch.delenv("TPU_KERNELS_LOCK")
        with pytest.raises(LockError, match="there is no lock: TPU_KERNELS_LOCK names none"):
            tpu_kernels.get_kernel(REPO, source="lock")

    def test_another_build_is_refused_and_named(
        self, locked: tuple[FakeHub, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, file = locked
        path = file.with_name("tpu-kernels.lock")
        right = path.read_text()
        build = json.loads(right)["kernels"][0]["builds"]["torch-tpu"]
        path.write_text(right.replace(build["files"]["late.py"], build["files"]["table.json"]))
        with pytest.raises(VerificationError, match=rf"its lock {file} lists:\n  changed: late\.py\n"):
            tpu_kernels.get_locked_kernel(REPO, lockfile=file)
        path.write_text(right.replace(build["metadata-sha256"], "0" * 64))
        with pytest.raises(VerificationError, match=rf"is not the one that {file} locks: its SHA-256"):
            tpu_kernels.get_locked_kernel(REPO, lockfile=file)
        path.write_text(right.replace("torch-tpu", "torch-universal"))
        with pytest.raises(VerificationError, match=r"torch-tpu is not in .*, which locks torch-universal; "):
            tpu_kernels.get_locked_kernel(REPO, lockfile=file)
        # Nor does another source quietly take its place.
        monkeypatch.setenv("TPU_KERNELS_LOCK", str(file))
        monkeypatch.setenv("TPU_KERNELS_SOURCES", "lock,hub")
        assert not tpu_kernels.has_kernel(REPO, version=1)

    def test_a_bucket_serves_the_locked_build_where_there_is_no_hub(
        self, locked: tuple[FakeHub, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server, file = locked
        mirror = shutil.copytree(server.root, tmp_path / "mirror")
        server.close()
        shutil.rmtree(tmp_path / "cache")
        monkeypatch.setenv("TPU_KERNELS_LOCK", str(file))
        monkeypatch.setenv("TPU_KERNELS_SOURCES", f"lock,{mirror}")
        assert tpu_kernels.get_kernel(REPO).PLACE == "locked"

    def test_a_locked_kernel_that_is_nowhere_ends_the_search(
        self,
        locked: tuple[FakeHub, Path],
        make_source: MakeSource,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        _, file = locked
        build_registry(make_source("PLACE = 'other'", version=2).parent, tmp_path / "registry")
        monkeypatch.setenv("TPU_KERNELS_LOCK", str(file))
        monkeypatch.setenv("TPU_KERNELS_SOURCES", f"lock,{tmp_path / 'registry'}")
        with pytest.raises(KernelNotFoundError, match=r"is locked by .*, and none of its sources has it"):
            tpu_kernels.get_kernel(REPO)

    def test_a_kernel_that_is_not_in_it_says_what_to_do(self, locked: tuple[FakeHub, Path]) -> None:
        _, file = locked
        with pytest.raises(
            LockError, match=rf"{OTHER} is not in {file}; add it to \[tool\.kernels\.dependencies\]"
        ):
            tpu_kernels.load_kernel(OTHER, lockfile=file)


class TestFinding:
    def test_a_script_finds_the_lock_of_its_project_and_no_other(
        self, locked: tuple[FakeHub, Path], tmp_path: Path
    ) -> None:
        _, file = locked
        show = "from tpu_kernels.hub.configuration import lock_file; print(lock_file())"
        script = file.parent / "scripts" / "train.py"
        script.parent.mkdir()
        script.write_text(show)
        elsewhere = tmp_path / "tool.py"
        elsewhere.write_text(show)
        for arguments, cwd, found in [
            ([str(script)], tmp_path, file),
            ([str(elsewhere)], file.parent, None),
            (["-c", show], file.parent, file),
            (["-c", show], tmp_path, None),
        ]:
            process = subprocess.run(
                [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=True, timeout=60
            )
            assert process.stdout == f"{found}\n"

    def test_a_command_takes_the_lock_of_a_project_that_it_is_given(
        self, locked: tuple[FakeHub, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """And of no other: it says so."""
        _, file = locked
        inside = file.parent / "src"
        inside.mkdir()
        monkeypatch.chdir(inside)
        monkeypatch.setenv("TPU_KERNELS_SOURCES", "local,lock,registry,hub")
        script = str(tmp_path / "bin" / "tpu-kernels")
        monkeypatch.setattr(sys.modules["__main__"], "__file__", script, raising=False)

        def command(*arguments: str) -> Result:
            return CliRunner().invoke(app, arguments)

        without = command("explain", REPO)
        assert ("chosen: " in without.stdout, "lock: " in without.stdout) == (True, False)
        assert without.stderr == f"note: {file} is not looked at; --project . does\n"
        answer = command("explain", REPO, "--project", ".")
        assert f"{file} locks it; from the hub\n" in answer.stdout
        assert not answer.stderr
        assert json.loads(command("info", REPO, "--project", ".", "--json").stdout)["source"] == "lock"
        versions = json.loads(command("versions", REPO, "--project", ".", "--json").stdout)["versions"]
        assert [(v["source"], v["version"], v["taken"]) for v in versions] == [
            ("lock", 1, True),
            ("hub", 1, False),
        ]
        listed = json.loads(command("list", "--project", ".", "--json").stdout)["kernels"]
        assert listed[0] == {"source": "lock", "kernel": REPO, "versions": [1], "alias-of": None}
        downloaded = json.loads(command("download", "--project", ".", "--json").stdout)
        assert [kernel["repo-id"] for kernel in downloaded["kernels"]] == [REPO]
        assert not downloaded["failures"]

    def test_a_project_without_a_lock_or_a_place_for_it_is_an_error(
        self, locked: tuple[FakeHub, Path], tmp_path: Path
    ) -> None:
        _, file = locked
        (tmp_path / "empty").mkdir()
        with pytest.raises(LockError, match=r"there is no kernels\.lock .* in .*empty or above it"):
            configured_sources("lock", Trust(), project=tmp_path / "empty")
        with pytest.raises(ConfigurationError, match="source leaves out the lock of "):
            configured_sources("hub", Trust(), project=file.parent)
        result = CliRunner().invoke(app, ["download"])
        assert (result.exit_code, "name a kernel" in result.stderr) == (2, True)

    def test_an_installed_package_brings_its_lock(
        self, locked: tuple[FakeHub, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, file = locked
        site = tmp_path / "site"
        metadata = site / "demo_package-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: demo-package\nVersion: 1.0\n")
        (metadata / "top_level.txt").write_text("demo_package\n")
        for name in ("kernels.lock", "tpu-kernels.lock"):
            shutil.copy(file.with_name(name), metadata)
        (site / "demo_package.py").write_text(
            f"import tpu_kernels\nplace = tpu_kernels.load_kernel({REPO!r}).PLACE\n"
        )
        monkeypatch.syspath_prepend(str(site))
        assert __import__("demo_package").place == "locked"
        with pytest.raises(LockError, match="there is no lock: the package of tests"):
            tpu_kernels.load_kernel(REPO)

    def test_a_lock_that_is_named_but_missing_is_an_error(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("TPU_KERNELS_LOCK", str(tmp_path / "kernels.lock"))
        with pytest.raises(LockError, match=r"there is no lock .*kernels\.lock; run: tpu-kernels lock"):
            tpu_kernels.has_kernel(REPO, version=1)

    def test_two_files_that_do_not_agree_are_an_error_until_locked_again(
        self, locked: tuple[FakeHub, Path]
    ) -> None:
        """As after stock `kernels lock`, which knows of one of them."""
        server, file = locked
        entry = {"dependency": {"repo-id": REPO, "version": 1}, "lock": {"commit": "0" * 40}}
        file.write_text(json.dumps([entry]))
        with pytest.raises(LockError, match=f"do not agree on {REPO}, version 1: .* run: tpu-kernels lock"):
            tpu_kernels.load_kernel(REPO, lockfile=file)
        entry["lock"] = {"commit": server.commit(REPO)}
        file.write_text(json.dumps([entry]))
        file.with_name("tpu-kernels.lock").write_text("{}")
        run(file.parent)
        assert tpu_kernels.load_kernel(REPO, lockfile=file).PLACE == "locked"
