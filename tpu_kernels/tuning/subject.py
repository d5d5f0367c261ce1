"""The kernel that is tuned."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from .. import authoring, hub
from ..analysis.cache import digest
from ..authoring.project import read_project
from ..errors import TuningError
from ..ops.tables import FOLDER, user_file


@dataclass(frozen=True)
class Subject:
    """A loaded kernel, as the search needs it.

    Attributes:
        module: The kernel.
        path: A copy of its build, for other processes to load.
        fingerprint: Of its files but the tables.
        source: The folder of tables in its source; None where it was not built from one now.
    """

    module: ModuleType
    path: Path
    fingerprint: str
    source: Path | None = None

    @property
    def tables(self) -> ModuleType:
        """Its copy of `tpu_kernels.ops.tables`.

        Raises:
            TuningError: It chooses nothing through it.
        """
        tables = sys.modules.get(f"{self.module.__name__}.tpu_ops.tables")
        if tables is None:
            raise TuningError(
                f"{self.module.__name__} cannot be tuned: it chooses no config through tpu_ops.tables.choose"
            )
        return tables

    def table(self, generation: str) -> Path:
        """Where its table for a generation belongs: its source, or else the user's cache."""
        if self.source is not None:
            return self.source / f"{generation}.json"
        return user_file(self.module.__name__, generation)


@contextlib.contextmanager
def loaded_kernel(module: ModuleType) -> Iterator[Subject]:
    """A kernel that `get_kernel` or `get_local_kernel` has loaded.

    Raises:
        TuningError: It is something else, or its files have no digests.
    """
    loaded = hub.find_loaded(module)
    if loaded is None:
        raise TuningError(
            f"{module.__name__} is no kernel that was loaded with get_kernel or get_local_kernel"
        )
    with tempfile.TemporaryDirectory(prefix="tpu-kernels-tune-") as folder:
        path = Path(folder, loaded.path.name)
        # (A build in the cache of the Hub is made of links, which no local kernel may have.)
        shutil.copytree(loaded.path, path, ignore=shutil.ignore_patterns("__pycache__"))
        yield Subject(module, path, _fingerprint(module))


@contextlib.contextmanager
def built_source(source: Path) -> Iterator[Subject]:
    """The kernel whose source is in a folder, built now; its tables are written there.

    Raises:
        InvalidMetadataError, BuildError: As `authoring.build`.
    """
    name = read_project(source).config.general.python_name
    with tempfile.TemporaryDirectory(prefix="tpu-kernels-tune-") as folder:
        path = Path(folder, source.name)
        authoring.build(source, path)
        module = hub.get_local_kernel(path)
        yield Subject(module, path, _fingerprint(module), source / "torch-ext" / name / FOLDER)


def _fingerprint(module: ModuleType) -> str:
    loaded = hub.find_loaded(module)
    if loaded is None or loaded.metadata.digest is None:
        raise TuningError(f"{module.__name__} has no digests of its files; build it with: tpu-kernels build")
    files = loaded.metadata.digest.files
    return digest({name: value for name, value in files.items() if not name.startswith(f"{FOLDER}/")})
