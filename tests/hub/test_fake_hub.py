"""The Hub of this machine: its answers and its faults, as a client meets them."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tpu_kernels.testing import FakeHub, Fault, Request


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeHub]:
    folder = tmp_path / "acme" / "relu" / "v1" / "build" / "torch-tpu"
    (folder / "inner").mkdir(parents=True)
    (folder / "metadata.json").write_text("{}")
    (folder / "inner" / "code.py").write_text("0123456789")
    with FakeHub(tmp_path, trusted=["acme"]) as server:
        yield server


def get(server: FakeHub, path: str, **headers: str) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(server.url + path, headers=headers)) as answer:
        content: bytes = answer.read()
        return content


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/api/kernels/acme/nothing/refs", "RepoNotFound"),
        ("/kernels/acme/nothing/resolve/v1/x", "RepoNotFound"),
        ("/api/kernels/acme/relu/revision/v9", "RevisionNotFound"),
        ("/kernels/acme/relu/resolve/v1/nothing", "EntryNotFound"),
        (
            "/kernels/acme/relu/resolve/v1/..%2F..%2Frelu%2Fv1%2Fbuild%2Ftorch-tpu%2Fmetadata.json",
            "EntryNotFound",
        ),
        ("/api/kernels/acme/relu/tree/v1/nothing", "EntryNotFound"),
    ],
)
def test_what_is_not_there_is_named_as_the_hub_names_it(server: FakeHub, path: str, code: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as raised:
        get(server, path)
    assert (raised.value.code, raised.value.headers["X-Error-Code"]) == (404, code)


def test_a_listing_goes_as_deep_as_asked(server: FakeHub) -> None:
    tree = "/api/kernels/acme/relu/tree/v1/build"
    assert [entry["path"] for entry in json.loads(get(server, tree))] == ["build/torch-tpu"]
    deep = {entry["path"]: entry["type"] for entry in json.loads(get(server, f"{tree}?recursive=true"))}
    assert deep["build/torch-tpu/inner"] == "directory"
    assert deep["build/torch-tpu/inner/code.py"] == "file"


def test_a_change_is_a_new_commit(server: FakeHub) -> None:
    before = server.commit("acme/relu")
    (server.root / "acme" / "relu" / "v1" / "README.md").write_text("# relu")
    [branch] = json.loads(get(server, "/api/kernels/acme/relu/refs"))["branches"]
    assert branch["targetCommit"] == server.commit("acme/relu") != before


def test_a_download_goes_on_where_it_stopped(server: FakeHub) -> None:
    path = "/kernels/acme/relu/resolve/v1/build/torch-tpu/inner/code.py"
    assert get(server, path, Range="bytes=4-") == b"456789"
    assert server.requests == [Request("GET", path, 206)]


def test_a_fault_breaks_as_many_requests_as_it_says(server: FakeHub) -> None:
    path = "/api/kernels/acme/relu/refs"
    server.inject(Fault("/refs", status=429, headers={"Retry-After": "7"}, times=1))
    with pytest.raises(urllib.error.HTTPError) as raised:
        get(server, path)
    assert raised.value.headers["Retry-After"] == "7"
    assert get(server, path)
    assert [request.status for request in server.requests] == [429, 200]


def test_a_cut_answer_ends_halfway(server: FakeHub) -> None:
    server.inject(Fault("code.py", cut=True))
    with pytest.raises(http.client.IncompleteRead) as raised:
        get(server, "/kernels/acme/relu/resolve/v1/build/torch-tpu/inner/code.py")
    assert raised.value.partial == b"01234"
    server.clear()
    assert get(server, "/kernels/acme/relu/resolve/v1/build/torch-tpu/inner/code.py") == b"0123456789"


def test_a_closed_hub_is_unreachable(server: FakeHub) -> None:
    server.close()
    with pytest.raises(urllib.error.URLError):
        get(server, "/api/kernels/acme/relu/refs")
