"""Sources that answer, refuse, hang, or are not there."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tpu_kernels.doctor import sources
from tpu_kernels.hub import registry_root
from tpu_kernels.testing import FakeHub, Fault

from .conftest import by_subject


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub(registry_root()) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_each_is_asked(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCAL_KERNELS", f"acme/relu={tmp_path}")
    found = by_subject(sources.examine(offline=False))
    assert {name: finding.level for name, finding in found.items()} == {
        "local": "problem",
        "registry": "ok",
        "hub": "ok",
    }
    assert "holds no built kernel" in found["local"].message


def test_none_is_asked_offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_KERNELS_SOURCES", "memory://nothing,hub")
    assert {finding.level for finding in sources.examine(offline=True)} == {"ok"}
    assert not hub.requests


def test_one_that_does_not_answer_is_a_problem_if_none_does(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
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


def test_one_that_hangs_holds_nobody_up(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_DEADLINE", 0.2)
    hub.inject(Fault("whoami", delay=30))
    found = by_subject(sources.examine(offline=False))["hub"]
    assert (found.level, found.message) == ("warning", "no answer within 0.2 s")


def test_buckets_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    fsspec.filesystem("memory").pipe_file(f"{url}/index.json", b"{}")
    monkeypatch.setenv("TPU_KERNELS_SOURCES", url)
    assert [finding.message for finding in sources.examine(offline=False)] == ["answers, with 0 kernels"]
