"""`metadata.json` and `index.json`: what is read, and how what is wrong is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_kernels.errors import InvalidMetadataError
from tpu_kernels.hub.metadata import Index, Metadata, parse_json

VALID: dict[str, Any] = {
    "name": "demo",
    "id": "_demo_tpu_0",
    "version": 1,
    "license": "MIT",
    "python-depends": [],
    "backend": {"type": "tpu"},
}
ENTRY = {"path": "a/b/v1", "metadata-sha256": "0" * 64}


def parse(**changes: Any) -> Metadata:
    return parse_json(Metadata, json.dumps({**VALID, **changes}).encode(), "metadata.json")


def test_unknown_keys_are_ignored() -> None:
    metadata = parse(provenance={"dirty": False}, tpu={"generations": ["v5e"], "megacore": True})
    assert metadata.tpu is not None
    assert list(metadata.tpu.generations) == ["v5e"]


@pytest.mark.parametrize("key", list(VALID))
def test_the_required_keys_of_stock_are_required(key: str) -> None:
    content = json.dumps({name: value for name, value in VALID.items() if name != key}).encode()
    with pytest.raises(InvalidMetadataError, match=rf"^metadata\.json: {key}: Field required$"):
        parse_json(Metadata, content, "metadata.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "1"}, "metadata.json: version: Input should be a valid integer, got '1'"),
        ({"id": "a b"}, "metadata.json: id: 'a b' is no Python identifier"),
        ({"id": "class"}, "metadata.json: id: 'class' is no Python identifier"),
        ({"name": "Demo"}, "metadata.json: name: String should match pattern"),
        ({"digest": {"algorithm": "md5", "files": {}}}, "metadata.json: digest.algorithm: Input should be"),
        (
            {"digest": {"algorithm": "sha256", "files": {"../x": "a"}}},
            "digest.files.../x: '../x' is no plain",
        ),
        ({"tpu": {"requires": {"jax": ">= ten"}}}, "tpu.requires.jax: Invalid specifier: '>= ten'"),
        ({"tpu": {"requires": {"../jax": ">=1"}}}, "tpu.requires.../jax: name is invalid"),
        ({"tpu": {"ops": {"f": {"dtypes": "float32"}}}}, "tpu.ops.f.dtypes: "),
        ({"tpu": {"provides": {"p": {"f": "import os"}}}}, "tpu.provides.p.f: 'import os' is no Python"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidMetadataError) as raised:
        parse(**changes)
    assert message in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidMetadataError, match=r"^metadata\.json: "):
        parse_json(Metadata, content, "metadata.json")


@given(
    st.binary()
    | st.recursive(st.none() | st.text(), lambda x: st.dictionaries(st.text(), x)).map(repr).map(str.encode)
)
def test_no_content_raises_anything_else(content: bytes) -> None:
    with pytest.raises(InvalidMetadataError):
        parse_json(Metadata, content, "metadata.json")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"kernels": {"a/b": {"0": ENTRY}}}, "index.json: kernels.a/b.0: String should match pattern"),
        ({"kernels": {"a/../b": {"1": ENTRY}}}, "index.json: kernels.a/../b: 'a/../b' names no kernel"),
        ({"kernels": {"a/b": {"1": {**ENTRY, "path": "../v1"}}}}, "kernels.a/b.1.path: '../v1' is no plain"),
        ({"kernels": {"a/b": {"1": {**ENTRY, "metadata-sha256": "0"}}}}, "kernels.a/b.1.metadata-sha256: "),
        (
            {"aliases": {"c/d": "a/b"}},
            "index.json: the alias 'c/d' leads to 'a/b', which is not in 'kernels'",
        ),
    ],
)
def test_a_malformed_index_is_named(index: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidMetadataError) as raised:
        parse_json(Index, json.dumps(index).encode(), "index.json")
    assert message in str(raised.value)
