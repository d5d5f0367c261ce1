"""What others write - metadata, index, lock, listings, refs - may be anything: only our error family comes out."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tpu_kernels
from tpu_kernels.errors import (
    InvalidMetadataError,
    LockError,
    SourceUnavailableError,
    TpuKernelsError,
    VerificationError,
)
from tpu_kernels.hub import layout
from tpu_kernels.hub.cache import HubCache
from tpu_kernels.hub.lock import Lock, parse_lock
from tpu_kernels.hub.metadata import Index, Metadata, parse_json
from tpu_kernels.testing import Fault

from .conftest import REPO, MakeSource, Publish, Serve

METADATA: dict[str, Any] = {
    "name": "demo",
    "id": "_demo_tpu_0",
    "version": 1,
    "license": "MIT",
    "python-depends": [],
    "kernel-depends": [{"repo-id": "a/b", "version": 1}],
    "backend": {"type": "tpu"},
    "digest": {"algorithm": "sha256", "files": {"__init__.py": "AAAA"}},
    "tpu": {
        "requires": {"jax": ">=0.10"},
        "generations": ["v5e"],
        "ops": {"add": {"dtypes": ["bfloat16"]}},
        "provides": {"transformers.experts": {"demo": "add"}},
    },
}
INDEX: dict[str, Any] = {
    "aliases": {"c/d": "a/b"},
    "kernels": {"a/b": {"1": {"path": "a/b/v1", "metadata-sha256": "0" * 64}}},
}
STOCK_LOCK: list[Any] = [{"dependency": {"repo-id": "a/b", "version": 1}, "lock": {"commit": "0" * 40}}]
DIGESTS: dict[str, Any] = {
    "format": 1,
    "kernels": [
        {
            "repo-id": "a/b",
            "version": 1,
            "commit": "0" * 40,
            "builds": {"torch-tpu": {"metadata-sha256": "0" * 64, "files": {"__init__.py": "AAAA"}}},
            "kernel-depends": [],
        }
    ],
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def mutated(draw: st.DrawFn, document: Any) -> bytes:
    """The document with something in it replaced, added, removed, cut off or flipped."""
    document = json.loads(json.dumps(document))
    places: list[tuple[Any, Any]] = []

    def visit(value: Any) -> None:
        keys = (
            value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        )
        for key in keys:
            places.append((value, key))
            visit(value[key])

    visit(document)
    for container, key in draw(st.lists(st.sampled_from(places), max_size=3)):
        action = draw(st.sampled_from(["replace", "remove", "rename"]))
        if isinstance(container, list) and not isinstance(key, str) and key >= len(container):
            continue
        if action == "replace":
            container[key] = draw(JSON)
        elif isinstance(container, dict) and key in container:
            value = container.pop(key)
            if action == "rename":
                container[draw(st.text())] = value
    content = json.dumps(document).encode()
    if draw(st.booleans()):
        place = draw(st.integers(0, len(content) - 1))
        flipped = bytes([content[place] ^ draw(st.integers(1, 255))])
        content = content[:place] + draw(st.sampled_from([b"", flipped])) + content[place + 1 :]
    return content[: draw(st.integers(0, len(content)))] if draw(st.booleans()) else content


@settings(max_examples=400)
@given(mutated(METADATA))
def test_metadata(content: bytes) -> None:
    try:
        metadata = parse_json(Metadata, content, "metadata.json")
    except InvalidMetadataError:
        return
    assert all(dependency.reference.pinned for dependency in metadata.kernel_depends)
    for path in metadata.digest.files if metadata.digest else ():
        Path("/kernel", path).resolve().relative_to("/kernel")


@settings(max_examples=400)
@given(mutated(INDEX))
def test_index(content: bytes) -> None:
    try:
        index = parse_json(Index, content, "index.json")
    except InvalidMetadataError:
        return
    for versions in index.kernels.values():
        for entry in versions.values():
            Path("/registry", entry.path).resolve().relative_to("/registry")


@settings(max_examples=400)
@given(mutated(STOCK_LOCK) | st.just(json.dumps(STOCK_LOCK).encode()), mutated(DIGESTS) | st.none())
def test_lock(stock: bytes, digests: bytes | None) -> None:
    with contextlib.suppress(LockError):
        assert isinstance(parse_lock(stock, digests, "kernels.lock"), Lock)


@settings(max_examples=200)
@given(mutated({"format_version": 1, "files": {"build/torch-tpu/a.py": {"size": 1, "blob_id": "0" * 40}}}))
def test_listing(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    root = tmp_path_factory.getbasetemp()
    path = root / "kernels--a--b" / "trees" / f"{'0' * 40}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    for name in HubCache(root).listing("a/b", "0" * 40) or ():
        Path("/kernel", name).resolve().relative_to("/kernel")


REFS = {
    "branches": [{"name": "v1", "ref": "refs/heads/v1", "targetCommit": "0" * 40}],
    "converts": [],
    "tags": [{"name": "x", "ref": "refs/tags/x", "targetCommit": "1" * 40}],
}
LISTING = [
    {"type": "directory", "path": "build/torch-tpu", "oid": "0" * 40, "size": 0},
    {"type": "file", "path": "build/torch-tpu/metadata.json", "oid": "0" * 40, "size": 100},
    {"type": "file", "path": "build/torch-tpu/__init__.py", "oid": "0" * 40, "size": 10},
]
PUBLISHER = {"name": "tpu-kernels", "fullname": "x", "avatarUrl": "", "trustedKernelPublisher": True}


@settings(max_examples=60)
@given(st.data())
def test_what_a_hub_answers(serve: Serve, publish: Publish, data: st.DataObject) -> None:
    """Whatever it says to one question: the kernel loads or the error is of the family."""
    publish(REPO, "")
    server = serve()
    part, document = data.draw(
        st.sampled_from(
            [("/refs", REFS), ("/tree/", LISTING), ("/overview", PUBLISHER), ("metadata.json", METADATA)]
        )
    )
    method = "GET" if part == "metadata.json" else None
    server.inject(Fault(part, status=200, body=data.draw(mutated(document)), method=method))
    with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNELS_CACHE", cache)
        with contextlib.suppress(TpuKernelsError):
            tpu_kernels.install_kernel(REPO, version=1)
    server.close()


class TestSizes:
    def test_a_document_without_end_is_refused(self, tmp_path: Path, publish: Publish) -> None:
        publish(REPO, "")
        variant = tmp_path / "repositories" / REPO / "v1" / "build" / "torch-tpu"
        with (variant / "metadata.json").open("ab") as file:
            file.truncate(layout.LARGEST_DOCUMENT * 100)
        with pytest.raises(InvalidMetadataError, match=f"it is larger than {layout.LARGEST_DOCUMENT} bytes"):
            tpu_kernels.get_local_kernel(variant)
        (tmp_path / "kernels.lock").write_bytes(b"[" * (layout.LARGEST_DOCUMENT + 1))
        with pytest.raises(LockError, match="it is larger than"):
            tpu_kernels.load_kernel(REPO, lockfile=tmp_path / "kernels.lock")

    def test_a_build_that_is_too_large_is_refused_unread(self, tmp_path: Path, publish: Publish) -> None:
        publish(REPO, "")
        variant = tmp_path / "repositories" / REPO / "v1" / "build" / "torch-tpu"
        with (variant / "weights.bin").open("wb") as file:
            file.truncate(layout.LARGEST_BUILD + 1)
        with pytest.raises(VerificationError, match=r"holds .* bytes, more than the 1073741824"):
            tpu_kernels.get_local_kernel(variant)

    @pytest.mark.parametrize("entries", [1, layout.MOST_FILES + 1])
    def test_a_listing_that_is_too_long_or_too_large_is_refused_before_the_download(
        self, publish: Publish, serve: Serve, entries: int
    ) -> None:
        publish(REPO, "")
        server = serve()
        metadata = (server.root / REPO / "v1" / "build" / "torch-tpu" / "metadata.json").read_bytes()
        listing = [
            {
                "type": "file",
                "path": f"build/torch-tpu/{number}.py",
                "oid": "0" * 40,
                "size": 2 * layout.LARGEST_BUILD,
            }
            for number in range(entries)
        ]
        listing.append(
            {
                "type": "file",
                "path": "build/torch-tpu/metadata.json",
                "oid": layout.git_id(metadata, "0" * 40),
                "size": len(metadata),
            }
        )
        server.inject(Fault("/tree/", status=200, body=json.dumps(listing).encode()))
        with pytest.raises(VerificationError, match="that a kernel may have; nothing of it was run"):
            tpu_kernels.get_kernel(REPO, version=1)
        assert not [request for request in server.requests if request.path.endswith("0.py")]

    def test_refs_without_end_are_refused(self, make_source: MakeSource, serve: Serve) -> None:
        server = serve(make_source())
        branch = {"name": "v1", "ref": "refs/heads/v1", "targetCommit": "0" * 40}
        body = json.dumps({"branches": [branch] * 10_001, "converts": [], "tags": []}).encode()
        server.inject(Fault("/refs", status=200, body=body))
        with pytest.raises(SourceUnavailableError, match="10001 branches and tags, more than the 10000"):
            tpu_kernels.get_kernel(REPO, version=1)
