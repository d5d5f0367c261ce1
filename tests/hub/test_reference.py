"""References: what is read, what is refused, and that none of them leads out of a folder."""

from __future__ import annotations

import posixpath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_kernels.errors import InvalidReferenceError, TpuKernelsError
from tpu_kernels.hub.layout import check_relative_path
from tpu_kernels.hub.reference import Reference

# Text made of what escapes are made of finds more than text made of all of Unicode.
HOSTILE = st.text(st.sampled_from("ab0_-./\\~:%@ \t\n\0é"), max_size=12) | st.text(max_size=12)


def stays_inside(path: str) -> bool:
    joined = posixpath.normpath(posixpath.join("/root/folder", path))
    return joined.startswith("/root/folder/") and joined == f"/root/folder/{path}"


@pytest.mark.parametrize(
    "repo_id", ["tpu-kernels/ragged-dot", "a/b", "Org_1/name.v2", "_a/b_", "0/1", "kernels-community/a-b.c_d"]
)
def test_repository_names_are_accepted(repo_id: str) -> None:
    assert Reference(repo_id).repo_id == repo_id


@pytest.mark.parametrize(
    "repo_id",
    [
        "",
        "name",
        "a/b/c",
        "/a/b",
        "a/",
        "../a",
        "a/..",
        "a/.b",
        "a/b.",
        "a/b--c",
        "a/b..c",
        "a\\b/c",
        "a/b\n",
    ],
)
def test_other_names_are_refused_with_the_form_they_should_have(repo_id: str) -> None:
    with pytest.raises(InvalidReferenceError, match="write 'org/name'") as raised:
        Reference(repo_id)
    assert repr(repo_id) in str(raised.value)


@pytest.mark.parametrize("repo_id", [None, 1, ("a", "b"), b"a/b", "a/" + "b" * 95])
def test_what_is_no_name_at_all_is_refused(repo_id: Any) -> None:
    with pytest.raises(InvalidReferenceError):
        Reference(repo_id)


@pytest.mark.parametrize("version", [0, -1, "1", 1.0, True])
def test_versions_are_whole_numbers_from_one(version: Any) -> None:
    with pytest.raises(InvalidReferenceError, match=r"version=.* is no kernel version.*version=1"):
        Reference("a/b", version)


@pytest.mark.parametrize("revision", ["main", "v1", "0" * 40, "refs/pr/7", "feature/fast--path", "v1.0+tpu"])
def test_revisions_are_branches_tags_and_commits(revision: str) -> None:
    assert Reference("a/b", revision=revision).revision == revision


@pytest.mark.parametrize("revision", ["", "..", "a/../b", "/a", "a/", "-x", "a b", "a\n", 1])
def test_other_revisions_are_refused(revision: Any) -> None:
    with pytest.raises(InvalidReferenceError, match="is no branch, tag or commit"):
        Reference("a/b", revision=revision)


def test_a_version_and_a_revision_exclude_each_other() -> None:
    with pytest.raises(InvalidReferenceError, match=r"both version=1 and revision='main'"):
        Reference("a/b", 1, "main")


@given(HOSTILE, HOSTILE)
def test_no_accepted_repository_leads_out_of_a_folder(organisation: str, name: str) -> None:
    for repo_id in (organisation, f"{organisation}/{name}"):
        try:
            reference = Reference(repo_id)
        except TpuKernelsError:
            continue
        assert stays_inside(reference.repo_id)
        assert reference.repo_id.count("/") == 1


@given(HOSTILE)
def test_no_accepted_revision_leads_out_of_a_folder(revision: str) -> None:
    try:
        Reference("a/b", revision=revision)
    except TpuKernelsError:
        return
    assert stays_inside(revision)


@given(HOSTILE)
def test_no_accepted_path_leads_out_of_a_folder(path: str) -> None:
    try:
        check_relative_path(path)
    except ValueError:
        return
    assert stays_inside(path)


@given(version=st.integers(1, 999_999_999), revision=st.sampled_from(["main", "v2", "0" * 40, "a/b"]))
def test_a_reference_is_read_from_text(version: int, revision: str) -> None:
    assert Reference.parse("acme/relu") == Reference("acme/relu")
    assert Reference.parse(f"acme/relu@{version}") == Reference("acme/relu", version)
    assert Reference.parse(f"acme/relu@{revision}") == Reference("acme/relu", revision=revision)


@given(HOSTILE, HOSTILE)
def test_text_that_is_no_reference_is_refused_as_such(repo_id: str, pin: str) -> None:
    for text in (repo_id, f"{repo_id}@{pin}", f"acme/relu@{pin}"):
        try:
            reference = Reference.parse(text)
        except InvalidReferenceError:
            continue
        assert stays_inside(reference.repo_id)
