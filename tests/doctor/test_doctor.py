"""The doctor, on machines and in environments that are made up, and on this one."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from typer.testing import CliRunner

from tpu_kernels import device
from tpu_kernels.authoring import build_registry
from tpu_kernels.cli import app
from tpu_kernels.device import Device
from tpu_kernels.doctor import caches, environment, integrations, machine, packages, sources
from tpu_kernels.doctor.finding import Finding, within
from tpu_kernels.hub import registry_root
from tpu_kernels.testing import FakeHub, Fault

TPU = Device("tpu", "v6e", chips=4)
CPU = Device("cpu", None, chips=0)


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment in which nothing is set that the doctor would speak of."""
    for name in list(os.environ):
        if name.startswith(("TPU_", "HF_", "JAX_", "KERNELS_", "LOCAL_KERNELS", "DO_NOT_", "DISABLE_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "*")


def by_subject(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


class TestPackages:
    def set(self, monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
        real = importlib.metadata.version

        def version(name: str) -> str:
            if name not in versions:
                return real(name)
            if (found := versions[name]) is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(importlib.metadata, "version", version)

    def test_what_is_installed_here_is_in_range(self) -> None:
        found = by_subject(packages.examine())
        assert {finding.level for finding in found.values()} == {"ok"}
        assert found["jax"].message.startswith(f"{importlib.metadata.version('jax')} (")
        assert "<5.25" in found["transformers"].message

    def test_what_is_out_of_range_or_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.set(monkeypatch, torch="2.1.0", transformers="4.0", jax=None, diffusers=None)
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

    def test_a_checkout_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packages, "_DISTRIBUTION", "no-such-package")
        found = by_subject(packages.examine())
        assert found["no-such-package"].level == "warning"
        assert found["torch"].level == "ok"


class TestMachine:
    @pytest.fixture
    def here(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Device], dict[str, Finding]]:
        def examine(found: Device) -> dict[str, Finding]:
            monkeypatch.setattr(device, "current", lambda: found)
            return by_subject(machine.examine())

        return examine

    def test_a_cpu_with_libtpu(
        self, here: Callable[[Device], dict[str, Finding]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = here(CPU)
        assert (found["TPU"].level, found["libtpu"].level) == ("ok", "warning")
        assert found["libtpu"].remedy == "export TPU_SKIP_MDS_QUERY=1"
        monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
        assert set(here(CPU)) == {"TPU", "jax"}

    def test_a_tpu(
        self, here: Callable[[Device], dict[str, Finding]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = here(TPU)
        assert found["TPU"].message == "TPU v6e, 4 chips"
        assert found["tcmalloc"].level == "warning"
        assert (found["jax"].level, "libtpu" in found) == ("ok", False)
        monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
        assert here(TPU)["jax"].level == "warning"
        assert here(Device("tpu", None, chips=1))["TPU"].level == "warning"

    def test_who_has_the_chips_open(
        self,
        here: Callable[[Device], dict[str, Finding]],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        assert here(TPU)["TPU users"].level == "ok"
        monkeypatch.setattr(machine, "_PROCESSES", tmp_path)
        for number, target in enumerate(("/dev/vfio/0", "/dev/null")):
            process = tmp_path / str(100 + number)
            (process / "fd").mkdir(parents=True)
            (process / "fd" / "3").symlink_to(target)
            (process / "comm").write_text("python\n")
        found = here(TPU)["TPU users"]
        assert (found.level, found.message) == ("warning", "open in python (process 100)")


class TestEnvironment:
    def test_what_is_set_is_told_without_secrets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setenv("HF_ENDPOINT", "https://me:secret@hub.example")
        found = by_subject(environment.examine())
        assert set(found) == {"HF_TOKEN", "HF_ENDPOINT", "KERNELS_CACHE"}
        assert not any("secret" in finding.message for finding in found.values())
        assert found["HF_ENDPOINT"].message == "https://...@hub.example: the Hub's address"

    def test_what_means_nothing_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TPU_KERNELS_SOURCE", "registry")
        monkeypatch.setenv("TPU_KERNELS_LOG", "loud")
        found = by_subject(environment.examine())
        assert found["TPU_KERNELS_SOURCE"].remedy == "did you mean TPU_KERNELS_SOURCES?"
        assert [f.level for f in environment.examine() if f.subject == "TPU_KERNELS_LOG"] == ["ok", "warning"]

    @pytest.mark.parametrize(
        ("name", "value"),
        [("TPU_KERNELS_SOURCES", "hubb"), ("TPU_KERNELS_TRUST", "a b"), ("LOCAL_KERNELS", "x")],
    )
    def test_what_cannot_be_read_is_a_problem(
        self, monkeypatch: pytest.MonkeyPatch, name: str, value: str
    ) -> None:
        monkeypatch.setenv(name, value)
        found = by_subject(environment.examine())["configuration"]
        assert (found.level, name in found.message) == ("problem", True)
        assert list(sources.examine(offline=True)) == []

    def test_stock_kernels_and_a_user_who_is_not_tracked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert importlib.metadata.version("kernels") == "0.17.2"
        monkeypatch.setenv("DO_NOT_TRACK", "1")
        levels = [f.level for f in environment.examine() if f.subject == "DO_NOT_TRACK"]
        assert levels == ["ok", "warning"]


class TestSources:
    @pytest.fixture
    def hub(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
        with FakeHub(registry_root()) as server:
            monkeypatch.setenv("HF_ENDPOINT", server.url)
            yield server

    def test_each_is_asked(self, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("LOCAL_KERNELS", f"acme/relu={tmp_path}")
        found = by_subject(sources.examine(offline=False))
        assert {name: finding.level for name, finding in found.items()} == {
            "local": "problem",
            "registry": "ok",
            "hub": "ok",
        }
        assert "holds no built kernel" in found["local"].message

    def test_none_is_asked_offline(self, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TPU_KERNELS_SOURCES", "memory://nothing,hub")
        assert {finding.level for finding in sources.examine(offline=True)} == {"ok"}
        assert not hub.requests

    def test_one_that_does_not_answer_is_a_problem_if_none_does(
        self, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.close()
        assert by_subject(sources.examine(offline=False))["hub"].level == "warning"
        monkeypatch.setenv("TPU_KERNELS_SOURCES", "hub,memory://nothing")
        assert [finding.level for finding in sources.examine(offline=False)] == ["problem", "problem"]

    @pytest.mark.parametrize(
        ("status", "token", "message"),
        [(503, None, "answers with status 503"), (401, "hf_old", "does not accept the token")],
    )
    def test_an_answer_may_be_a_no(
        self,
        hub: FakeHub,
        monkeypatch: pytest.MonkeyPatch,
        status: int,
        token: str | None,
        message: str,
    ) -> None:
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        hub.inject(Fault("whoami", status=status))
        found = by_subject(sources.examine(offline=False))["hub"]
        assert (found.level, message in found.message) == ("warning", True)

    def test_one_that_hangs_holds_nobody_up(self, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sources, "_DEADLINE", 0.2)
        hub.inject(Fault("whoami", delay=30))
        found = by_subject(sources.examine(offline=False))["hub"]
        assert (found.level, found.message) == ("warning", "no answer within 0.2 s")

    def test_buckets_are_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        url = f"memory://{uuid.uuid4().hex}"
        fsspec.filesystem("memory").pipe_file(f"{url}/index.json", b"{}")
        monkeypatch.setenv("TPU_KERNELS_SOURCES", url)
        assert [finding.message for finding in sources.examine(offline=False)] == ["answers, with 0 kernels"]


class TestCaches:
    def test_they_are_measured(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TPU_KERNELS_CACHE", str(tmp_path / "ours"))
        (tmp_path / "ours" / "compile").mkdir(parents=True)
        (tmp_path / "ours" / "compile" / "0.json").write_text("{}")
        found = by_subject(caches.examine())
        assert {finding.level for finding in found.values()} == {"ok"}
        assert found["compiler"].message.startswith(f"{tmp_path}/ours/compile: 2 B, ")

    def test_one_that_cannot_be_written_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "file" / "cache"))
        found = by_subject(caches.examine())["kernels of the Hub"]
        assert (found.level, "cannot be written" in found.message) == ("warning", True)

    def test_a_disk_that_is_full_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(caches, "_LITTLE", 1 << 62)
        assert {finding.level for finding in caches.examine()} == {"warning"}


class TestIntegrations:
    def test_what_a_process_of_its_own_tells(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TPU_KERNELS_SOURCES", "registry")
        found = by_subject(integrations.examine(offline=True))
        assert (found["kernels"].level, found["transformers"].level) == ("ok", "ok")
        assert "tpu_grouped_mm, tpu_ragged_dot" in found["transformers"].message
        # transformers 5.24 takes a newer one than the one that is installed for these tests.
        assert found["stock kernels"].level == "warning"

    def test_a_kernel_that_does_not_load_is_a_problem(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        build_registry(Path(__file__).parents[1] / "authoring", tmp_path / "other")
        monkeypatch.setenv("TPU_KERNELS_SOURCES", str(tmp_path / "other"))
        found = by_subject(integrations.examine(offline=True))
        assert (found["kernels"].level, "KernelNotFoundError" in found["kernels"].message) == (
            "problem",
            True,
        )
        assert found["transformers"].level == "warning"

    def test_a_process_that_crashes_or_hangs_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(integrations, "__package__", "no_such_package")
        assert "No module named" in integrations._probe(offline=True)["kernel"]
        monkeypatch.setattr(integrations, "_DEADLINE", 0.01)
        assert integrations._probe(offline=True) == {"kernel": "it did not within 0.01 s"}


def test_what_hangs_is_left_behind() -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer within"):
        within(0.05, lambda: time.sleep(30))
    assert time.monotonic() - start < 10
    with pytest.raises(ZeroDivisionError):
        within(10, lambda: 1 / 0)


class TestCommand:
    def test_all_of_it_as_data(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TPU_KERNELS_SOURCES", "registry")
        monkeypatch.setattr(integrations, "_probe", lambda offline: {"table": ["tpu_ragged_dot"]})
        result = CliRunner().invoke(app, ["doctor", "--offline", "--json"])
        data = json.loads(result.stdout)
        assert (result.exit_code, data["problems"]) == (0, 0)
        assert list(dict.fromkeys(finding["section"] for finding in data["findings"])) == [
            "packages",
            "machine",
            "environment",
            "sources",
            "caches",
            "integrations",
        ]
        assert set(data["findings"][0]) == {"section", "level", "subject", "message", "remedy"}

    def test_a_problem_has_an_exit_status(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TPU_KERNELS_SOURCES", "nonsense")
        monkeypatch.setattr(integrations, "examine", lambda offline: iter(()))
        result = CliRunner().invoke(app, ["doctor", "--offline"])
        assert result.exit_code == 1
        assert "problem  configuration: TPU_KERNELS_SOURCES names 'nonsense'" in result.stdout
        assert "do: correct or unset it" in result.stdout

    def test_it_imports_nothing_that_would_open_a_tpu(self) -> None:
        script = (
            "import sys\nfrom tpu_kernels.doctor import examine, integrations\n"
            "integrations._probe = lambda offline: {}\nlist(examine(offline=True))\n"
            "assert not {'torch', 'torch_tpu', 'jax', 'transformers'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
