"""Where kernels are published to: a repository on the Hub, or a registry in a folder or bucket."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import PublishError, TpuKernelsError
from ..files import replace_folder
from ..hub.configuration import ENDPOINT_VARIABLE
from ..hub.manage.mirror import mirror
from ..hub.manage.publish import read_index, withdraw
from ..hub.reference import Reference, check_repo_id
from ..hub.sources import RegistrySource
from ..hub.storage import Storage
from .builder import BuiltKernel
from .registry import registry_files

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_HUB, _MAIN = "hub:", "main"
# What the Hub itself puts into a repository.
_HUBS_OWN = frozenset({".gitattributes"})


class Target(Protocol):
    """A place that kernels are published to."""

    def repo_id(self, declared: str) -> str:
        """The repository that a kernel gets, which itself declares one."""

    def published(self, repo_id: str, version: int) -> Mapping[str, bytes] | None:
        """The files of a version by path, None where there is none.

        Raises:
            TpuKernelsError: The place cannot be read.
        """

    def put(self, kernel: BuiltKernel, former: Mapping[str, bytes] | None) -> None:
        """Publishes a kernel, in the place of what was read there before.

        Raises:
            TpuKernelsError: It cannot be written.
        """

    def withdraw(self, repo_id: str, version: int) -> None:
        """Takes a version back: it is found no more.

        Raises:
            TpuKernelsError: It cannot be written.
        """


def parse_target(text: str) -> Target:
    """Reads `hub:ORG/NAME`, or a folder or URL of a registry such as `gs://bucket/kernels`.

    Raises:
        InvalidReferenceError: After `hub:` there is no repository.
    """
    if text.startswith(_HUB):
        return HubTarget(check_repo_id(text.removeprefix(_HUB)))
    return RegistryTarget(text)


@dataclass(frozen=True)
class RegistryTarget:
    """A registry: files by repository and version, and an index, which makes them visible."""

    url: str

    def repo_id(self, declared: str) -> str:
        return declared

    def published(self, repo_id: str, version: int) -> Mapping[str, bytes] | None:
        storage = Storage(self.url)
        entry = read_index(storage).kernels.get(repo_id, {}).get(str(version))
        if entry is None:
            return None
        contents = {name: storage.read(f"{entry.path}/{name}") for name in storage.names(entry.path)}
        return {name: content for name, content in contents.items() if content is not None}

    def put(self, kernel: BuiltKernel, former: Mapping[str, bytes] | None) -> None:
        version = kernel.metadata.version
        with tempfile.TemporaryDirectory(prefix="tpu-kernels-publish-") as folder:
            replace_folder(Path(folder, "registry"), registry_files([kernel]), PublishError)
            source = RegistrySource(Path(folder, "registry"), "build")
            report = mirror([Reference(kernel.repo_id, version)], self.url, source)
        for failure in report.failures:
            raise failure.error

    def withdraw(self, repo_id: str, version: int) -> None:
        withdraw(Storage(self.url), repo_id, version)


@dataclass(frozen=True)
class HubTarget:
    """A kernel repository on the Hub, a branch a version. huggingface_hub brings the token and the address."""

    repository: str

    def repo_id(self, declared: str) -> str:
        return self.repository

    def published(self, repo_id: str, version: int) -> Mapping[str, bytes] | None:
        commit = self._branches().get(_branch(version))
        if commit is None:
            return None
        with _failures(f"{repo_id} cannot be read"), tempfile.TemporaryDirectory() as folder:
            self._api.snapshot_download(
                repo_id, repo_type="kernel", revision=commit, local_dir=folder, cache_dir=f"{folder}/.cache"
            )
            return {
                path.relative_to(folder).as_posix(): path.read_bytes()
                for path in sorted(Path(folder).rglob("*"))
                if path.is_file() and not path.relative_to(folder).parts[0].startswith(".")
            }

    def put(self, kernel: BuiltKernel, former: Mapping[str, bytes] | None) -> None:

        branch = _branch(kernel.metadata.version)
        with _failures(f"{kernel.repo_id} cannot be published"):
            self._api.create_repo(kernel.repo_id, repo_type="kernel", exist_ok=True)
            if former is not None:
                self._commit(kernel, branch)
                return
            # First where nobody looks for versions, so that the new one is there as a whole or not at all.
            commit = self._commit(kernel, _MAIN)
            self._api.create_branch(kernel.repo_id, branch=branch, revision=commit, repo_type="kernel")

    def _commit(self, kernel: BuiltKernel, branch: str) -> str:
        """Makes a branch hold the kernel, by a commit, whose name is returned."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        there = set(self._api.list_repo_files(kernel.repo_id, repo_type="kernel", revision=branch))
        operations: list[Any] = [CommitOperationAdd(path, content) for path, content in kernel.files.items()]
        operations += [
            CommitOperationDelete(path) for path in sorted(there - kernel.files.keys() - _HUBS_OWN)
        ]
        done = self._api.create_commit(
            kernel.repo_id,
            operations,
            commit_message=f"{kernel.metadata.name} v{kernel.metadata.version}: {kernel.metadata.id}",
            repo_type="kernel",
            revision=branch,
            # Another one's commit in between is not to be overwritten.
            parent_commit=self._branches().get(branch),
        )
        return str(done.oid)

    def withdraw(self, repo_id: str, version: int) -> None:
        with _failures(f"{repo_id} v{version} cannot be taken back"):
            self._api.delete_branch(repo_id, branch=_branch(version), repo_type="kernel")

    @property
    def _api(self) -> HfApi:
        from huggingface_hub import HfApi

        from .. import __version__

        endpoint = os.environ.get(ENDPOINT_VARIABLE, "").rstrip("/") or None
        return HfApi(endpoint=endpoint, library_name="tpu-kernels", library_version=__version__)

    def _branches(self) -> dict[str, str]:
        from huggingface_hub.errors import RepositoryNotFoundError

        with _failures(f"{self.repository} was not looked up"):
            try:
                refs = self._api.list_repo_refs(self.repository, repo_type="kernel")
            except RepositoryNotFoundError:
                return {}
            return {branch.name: branch.target_commit for branch in refs.branches}


def _branch(version: int) -> str:
    return f"v{version}"


@contextlib.contextmanager
def _failures(what: str) -> Iterator[None]:
    """Errors of the Hub as ours, with its words."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    try:
        yield
    except TpuKernelsError:
        raise
    except (HTTPError, OSError, ValueError) as error:
        said = " ".join(str(error).split())
        raise PublishError(f"{what}: {type(error).__name__}: {said or 'no reason'}") from error
