"""The part of the Hub's protocol that publishing takes: repositories, branches, commits, in the folder of a `FakeHub`.

Files of any size are taken within the commit itself, so that no storage of large files is needed.
"""

from __future__ import annotations

import base64
import json
import shutil
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..hub.layout import check_relative_path
from ..hub.reference import is_repo_id

if TYPE_CHECKING:
    from .fake_hub import FakeHub

Answer = tuple[int, bytes, Mapping[str, str]]
_MAIN = "main"


def answer(hub: FakeHub, method: str, path: str, body: bytes) -> Answer:
    """Carries out a request and answers it: status, body, headers."""
    match method, [urllib.parse.unquote(part) for part in path.strip("/").split("/")]:
        case "POST", ["api", "repos", "create"]:
            return _create(hub, json.loads(body))
        case "POST", ["api", "validate-yaml"]:
            return _json({"errors": [], "warnings": []})
        case _, ["api", "kernels", organisation, name, *action]:
            repo_id = f"{organisation}/{name}"
        case _:
            return _error(404, "EntryNotFound")
    branches = hub.branches(repo_id)
    if branches is None:
        return _error(404, "RepoNotFound")
    match method, action:
        case "POST", ["branch", branch]:
            return _branch(hub, repo_id, branch, json.loads(body or b"{}").get("startingPoint"))
        case "DELETE", ["branch", branch] if branch in branches:
            shutil.rmtree(hub.root / repo_id / branch)
            return _json({})
        case "POST", ["preupload", branch] if branch in branches:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return _json({"files": files})
        case "POST", ["commit", branch] if branch in branches:
            return _commit(hub, repo_id, branch, [json.loads(line) for line in body.splitlines()])
    return _error(404, "RevisionNotFound")


def _create(hub: FakeHub, wanted: Mapping[str, Any]) -> Answer:
    repo_id = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
    url = {"url": f"{hub.url}/kernels/{repo_id}"}
    if wanted.get("type") != "kernel" or not is_repo_id(repo_id):
        return _error(400, "")
    if hub.branches(repo_id) is not None:
        return _json(url, 409)
    (hub.root / repo_id / _MAIN).mkdir(parents=True)
    return _json(url)


def _branch(hub: FakeHub, repo_id: str, branch: str, start: str | None) -> Answer:
    folder = hub.root / repo_id / check_relative_path(branch)
    if folder.exists():
        return _error(409, "")
    for other in hub.branches(repo_id) or ():
        if start in (other, hub.commit(repo_id, other)) or (start is None and other == _MAIN):
            shutil.copytree(hub.root / repo_id / other, folder)
            return _json({})
    return _error(404, "RevisionNotFound")


def _commit(hub: FakeHub, repo_id: str, branch: str, lines: list[dict[str, Any]]) -> Answer:
    folder = hub.root / repo_id / branch
    for line in lines:
        value = line["value"]
        match line["key"]:
            case "header" if value.get("parentCommit") not in (None, hub.commit(repo_id, branch)):
                return _error(412, "")  # another commit came first
            case "file":
                target = _inside(folder, value["path"])
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(base64.b64decode(value["content"]))
            case "deletedFile":
                _inside(folder, value["path"]).unlink()
    commit = hub.commit(repo_id, branch)
    return _json(
        {"commitUrl": f"{hub.url}/kernels/{repo_id}/commit/{commit}", "commitOid": commit, "success": True}
    )


def _inside(folder: Path, path: str) -> Path:
    return folder / check_relative_path(path)


def _json(value: object, status: int = 200) -> Answer:
    return status, json.dumps(value).encode(), {"Content-Type": "application/json"}


def _error(status: int, code: str) -> Answer:
    return status, b"", {"X-Error-Code": code} if code else {}
