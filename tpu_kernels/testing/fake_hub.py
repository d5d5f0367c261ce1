"""A Hub of kernels on the loopback interface, for this library's loader and for stock `kernels`.

It serves a folder in the layout of a registry, a branch a folder::

    <root>/<org>/<name>/v1/build/torch-tpu/metadata.json

so that the shipped registry is such a folder. It speaks the part of the Hub's protocol that loading takes
(refs, revisions, trees, files by `HEAD`, `GET` and range, publishers) and that publishing takes (`uploads`), keeps a
log of requests, and breaks where a test tells it to. It sends nothing to any other machine.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import socket
import threading
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from . import uploads

_COMMIT = re.compile(r"[0-9a-f]{40}")

# What huggingface_hub asks once a day about the tools of its user; it has nothing to do with kernels.
_UNLOGGED = "/api/agent-harnesses"


@dataclass(frozen=True)
class Request:
    """A request as it was answered. `status` is 0 where the connection was cut."""

    method: str
    path: str
    status: int


@dataclass
class Fault:
    """What goes wrong with the requests whose path contains `path`, `times` times (None: always).

    `delay` seconds pass first. Then the answer is `status` with `headers` and `body`, or half of the right
    answer where `cut` is set, or the right answer. `method` narrows it to `HEAD` or `GET`.

    Example:
        >>> busy = Fault("/refs", status=429, headers={"Retry-After": "1"}, times=1)
        >>> broken = Fault("late.py", cut=True, method="GET")
    """

    path: str
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut: bool = False
    delay: float = 0.0
    times: int | None = None
    method: str | None = None


class FakeHub:
    """Serves the kernels in `root` until it is closed; a context manager.

    Args:
        root: A folder of kernels, `<org>/<name>/<branch>/build/...`. What changes in it is a new commit.
        trusted: The organisations that the Hub calls trusted kernel publishers.
        token: The token without which there is nothing to see here; None for a public Hub.

    This library takes the address from `HF_ENDPOINT` at each call. Stock `kernels` takes it when it is
    imported, so that a test of that runs in a process of its own, with `environment`.

    Example:
        >>> import urllib.request
        >>> from tpu_kernels.hub import registry_root
        >>> with FakeHub(registry_root()) as hub:
        ...     answer = urllib.request.urlopen(f"{hub.url}/api/kernels/tpu-kernels/ragged-dot/refs")
        >>> answer.status, hub.requests[0].path
        (200, '/api/kernels/tpu-kernels/ragged-dot/refs')
    """

    def __init__(self, root: str | Path, *, trusted: Iterable[str] = (), token: str | None = None) -> None:
        self.root = Path(root)
        self.trusted = set(trusted)
        self.token = token
        self._requests: list[Request] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._closing = threading.Event()
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, name="fake-hub", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops serving and cuts the open connections: from then on this Hub is unreachable."""
        if not self._closing.is_set():
            self._closing.set()
            self._server.shutdown()
            self._server.server_close()
            self._server.cut_connections()
            self._thread.join()

    @property
    def requests(self) -> list[Request]:
        """The requests so far, in the order they came in; one is here before its answer is sent."""
        with self._lock:
            return list(self._requests)

    def clear(self) -> None:
        """Empties the log of requests and takes every fault away."""
        with self._lock:
            self._requests.clear()
            self._faults.clear()

    def inject(self, fault: Fault) -> None:
        """Switches a fault on; the first one that fits a request breaks it."""
        with self._lock:
            self._faults.append(fault)

    def environment(self, home: str | Path) -> dict[str, str]:
        """The variables that point a process at this Hub, with its cache and token in the folder `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "NO_PROXY": "*",
        }

    def commit(self, repo_id: str, branch: str = "v1") -> str:
        """The commit that a branch points to now: a hash of what the branch holds."""
        folder = self.root / repo_id / branch
        listing = [repo_id] + [f"{path} {_git_id(file)}" for path, file in _files(folder).items()]
        return hashlib.sha1("\n".join(listing).encode()).hexdigest()

    def branches(self, repo_id: str) -> list[str] | None:
        """The branches of a repository, None where there is no such repository."""
        folder = self.root / repo_id
        return sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else None

    def _record(self, request: Request) -> None:
        with self._lock:
            self._requests.append(request)

    def _take_fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.path in path and fault.method in (None, method) and fault.times != 0:
                    if fault.times is not None:
                        fault.times -= 1
                    return fault
        return None

    def _answer(self, path: str, query: Mapping[str, list[str]]) -> _Answer:
        parts = [urllib.parse.unquote(part) for part in path.strip("/").split("/")]
        match parts:
            case ["api", "organizations", organisation, "overview"]:
                return self._publisher(organisation)
            case ["api", "kernels", organisation, name, *action]:
                repo_id = f"{organisation}/{name}"
            case ["kernels", organisation, name, "resolve", revision, *file]:
                return self._file(f"{organisation}/{name}", revision, "/".join(file))
            case _:
                return _error(404, "EntryNotFound")
        branches = self.branches(repo_id)
        if branches is None:
            return _error(404, "RepoNotFound")
        match action:
            case ["refs"]:
                refs = [
                    {"name": b, "ref": f"refs/heads/{b}", "targetCommit": self.commit(repo_id, b)}
                    for b in branches
                ]
                return _json({"branches": refs, "converts": [], "tags": []})
            case ["revision", revision]:
                return self._revision(repo_id, revision)
            case ["tree", revision, *folder]:
                recursive = query.get("recursive", ["false"])[0].lower() == "true"
                return self._tree(repo_id, revision, "/".join(folder), recursive)
        return _error(404, "EntryNotFound")

    def _publisher(self, organisation: str) -> _Answer:
        if not (self.root / organisation).is_dir():
            return _error(404, "")
        flag = {"trustedKernelPublisher": True} if organisation in self.trusted else {}
        return _json({"name": organisation, "fullname": organisation, "avatarUrl": "", **flag})

    def _revision(self, repo_id: str, revision: str) -> _Answer:
        branch = self._branch(repo_id, revision)
        if branch is None:
            return _error(404, "RevisionNotFound")
        files = [{"rfilename": path} for path in _files(self.root / repo_id / branch)]
        return _json({"id": repo_id, "sha": self.commit(repo_id, branch), "siblings": files})

    def _tree(self, repo_id: str, revision: str, folder: str, recursive: bool) -> _Answer:
        branch = self._branch(repo_id, revision)
        if branch is None:
            return _error(404, "RevisionNotFound")
        prefix = f"{folder}/" if folder else ""
        listing: dict[str, dict[str, Any]] = {}
        for path, file in _files(self.root / repo_id / branch).items():
            if path.startswith(prefix):
                # Every folder on the way down to the file is an entry of its own.
                inner = path.removeprefix(prefix).split("/")
                for depth in range(1, len(inner)):
                    parent = prefix + "/".join(inner[:depth])
                    listing[parent] = {"type": "directory", "path": parent, "oid": "0" * 40, "size": 0}
                size = file.stat().st_size
                listing[path] = {"type": "file", "path": path, "oid": _git_id(file), "size": size}
        if folder and not listing:
            return _error(404, "EntryNotFound")
        entries = listing.values()
        return _json([e for e in entries if recursive or "/" not in e["path"].removeprefix(prefix)])

    def _file(self, repo_id: str, revision: str, path: str) -> _Answer:
        if self.branches(repo_id) is None:
            return _error(404, "RepoNotFound")
        branch = self._branch(repo_id, revision)
        if branch is None:
            return _error(404, "RevisionNotFound")
        commit = {"X-Repo-Commit": self.commit(repo_id, branch)}
        # A look-up in the listing, not in the file system: no path can lead out of the repository.
        file = _files(self.root / repo_id / branch).get(path)
        if file is None:
            return _error(404, "EntryNotFound", commit)
        headers = {**commit, "ETag": f'"{_git_id(file)}"', "Accept-Ranges": "bytes"}
        return _Answer(200, file.read_bytes(), headers)

    def _branch(self, repo_id: str, revision: str) -> str | None:
        for branch in self.branches(repo_id) or ():
            if revision in (branch, f"refs/heads/{branch}"):
                return branch
            if _COMMIT.fullmatch(revision) and revision == self.commit(repo_id, branch):
                return branch
        return None


@dataclass(frozen=True)
class _Answer:
    status: int
    body: bytes
    headers: Mapping[str, str]


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: FakeHub) -> None:
        self.hub = hub
        self._connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._connections.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or was cut off, is no news."""

    def cut_connections(self) -> None:
        # Threads wait on kept-alive connections and would go on serving them.
        for connection in list(self._connections):
            self.shutdown_request(connection)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr: the log is `FakeHub.requests`."""

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def _serve(self) -> None:
        hub = self.server.hub
        url = urllib.parse.urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = hub._take_fault(self.command, url.path) or Fault("")
        if fault.status is not None:
            answer = _Answer(fault.status, fault.body, fault.headers)
        elif hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            answer = _error(401, "RepoNotFound")
        elif self.command in ("POST", "DELETE"):
            answer = self._written(url.path, body)
        else:
            answer = self._part(hub._answer(url.path, urllib.parse.parse_qs(url.query)))
        if url.path != _UNLOGGED:
            hub._record(Request(self.command, self.path, 0 if fault.cut else answer.status))
        if fault.delay:
            hub._closing.wait(fault.delay)
        self._send(answer, cut=fault.cut)

    def _written(self, path: str, body: bytes) -> _Answer:
        if not self.headers.get("Authorization"):
            return _error(401, "")
        with self.server.hub._writing:
            return _Answer(*uploads.answer(self.server.hub, self.command, path, body))

    def _part(self, answer: _Answer) -> _Answer:
        """What a `Range: bytes=N-` asks for, which is how an interrupted download goes on."""
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if not wanted or answer.status != 200:
            return answer
        start, size = int(wanted[1]), len(answer.body)
        if start >= size:
            return _Answer(416, b"", {"Content-Range": f"bytes */{size}"})
        headers = {**answer.headers, "Content-Range": f"bytes {start}-{size - 1}/{size}"}
        return _Answer(206, answer.body[start:], headers)

    def _send(self, answer: _Answer, *, cut: bool) -> None:
        body = b"" if self.command == "HEAD" else answer.body
        self.close_connection = self.close_connection or cut
        if cut and not body:
            return
        self.send_response(answer.status)
        for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)


def _json(value: object) -> _Answer:
    return _Answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})


def _error(status: int, code: str, headers: Mapping[str, str] | None = None) -> _Answer:
    return _Answer(status, b"", {**(headers or {}), **({"X-Error-Code": code} if code else {})})


def _files(folder: Path) -> dict[str, Path]:
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return dict(sorted(item for item in files.items() if "__pycache__" not in item[0]))


def _git_id(file: Path) -> str:
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
