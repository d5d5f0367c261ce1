"""Where a registry lies: a folder, or a bucket or anything else that fsspec reaches."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CopyError, SourceUnavailableError
from ..files import replace_file


@dataclass(frozen=True)
class Storage:
    """The files below `url`: a path, or a URL such as `gs://bucket/kernels`."""

    url: str

    @property
    def folder(self) -> Path | None:
        """The folder that it is, None for one that is not on this machine."""
        file_system, root = self._file_system
        return Path(root) if "file" in _protocols(file_system) else None

    def read(self, path: str, *, limit: int | None = None) -> bytes | None:
        """The content of a file, cut off just past `limit` bytes; None where there is none.

        Raises:
            SourceUnavailableError: It cannot be read.
        """
        file_system, root = self._file_system
        # Object stores refuse to give a part of an empty file, so only documents are asked for in part.
        part = {} if limit is None else {"start": 0, "end": limit + 1}
        try:
            return bytes(file_system.cat_file(f"{root}/{path}", **part))
        except FileNotFoundError:
            return None
        except Exception as error:  # each file system raises errors of its own
            raise SourceUnavailableError(f"{self._name(path)} cannot be read: {_tell(error)}") from error

    def write(self, path: str, content: bytes) -> None:
        """Writes a file, whole or not at all: a bucket shows an object when it is complete.

        Raises:
            CopyError: It cannot be written.
        """
        file_system, root = self._file_system
        try:
            if self.folder is not None:
                replace_file(self.folder / path, content)
            else:
                file_system.pipe_file(f"{root}/{path}", content)
        except Exception as error:
            raise CopyError(f"{self._name(path)} cannot be written: {_tell(error)}") from error

    def names(self, path: str) -> list[str]:
        """The files below a folder, by their paths in it; empty where there is no such folder.

        Raises:
            SourceUnavailableError: It cannot be listed.
        """
        file_system, root = self._file_system
        try:
            file_system.invalidate_cache()
            found = file_system.find(f"{root}/{path}")
        except FileNotFoundError:
            return []
        except Exception as error:
            raise SourceUnavailableError(f"{self._name(path)} cannot be listed: {_tell(error)}") from error
        prefix = f"{root}/{path}/"
        return sorted(name.removeprefix(prefix) for name in found if name.startswith(prefix))

    def remove(self, path: str) -> None:
        """Removes a file.

        Raises:
            CopyError: It cannot be removed.
        """
        file_system, root = self._file_system
        try:
            file_system.rm_file(f"{root}/{path}")
        except FileNotFoundError:
            pass
        except Exception as error:
            raise CopyError(f"{self._name(path)} cannot be removed: {_tell(error)}") from error

    @functools.cached_property
    def _file_system(self) -> tuple[Any, str]:
        import fsspec  # type: ignore[import-untyped]

        try:
            file_system, root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise SourceUnavailableError(f"{self.url} cannot be read: {error}") from error
        return file_system, str(root).rstrip("/")

    def _name(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/{path}"


def _protocols(file_system: Any) -> tuple[str, ...]:
    protocol = file_system.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _tell(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
