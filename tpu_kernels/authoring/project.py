"""A kernel's source: its `build.toml`, its package and its card.

The layout and the `[general]` table are those of stock kernel-builder. The `[tpu]` table is this project's,
and says what ends up in the `tpu` section of `metadata.json`::

    <project>/
      build.toml
      README.md                       the kernel card
      torch-ext/<python_name>/        the package
      tests/
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ..errors import BuildError, InvalidMetadataError
from ..hub.layout import CARD_FILE, list_files
from ..hub.metadata import Identifier, KernelName, Model, NonEmpty, Op, RepoId, Tpu, parse_object

CONFIG_FILE = "build.toml"


class Hub(Model):
    """`[general.hub]`: where the kernel is published."""

    repo_id: RepoId


class General(Model):
    """`[general]`: the kernel's name, version and licence."""

    name: KernelName
    version: Annotated[int, Field(ge=1)]
    license: NonEmpty
    backends: Sequence[str]
    hub: Hub

    @property
    def python_name(self) -> str:
        """The name of the package."""
        return self.name.replace("-", "_")


# A misspelt key of the [tpu] table would be lost without a word, so there it is an error.
class OpConfig(Op, extra="forbid"):
    """`[tpu.ops.<name>]`: one torch op."""


class TpuConfig(Tpu, extra="forbid"):
    """`[tpu]`: the `tpu` section of the metadata, and what only the build needs.

    Attributes:
        aliases: Other repository names that lead to the kernel.
        include: Kernels in the folders beside this one whose packages become part of this one's, each as a
            sub-package under its own name.
    """

    ops: Mapping[Identifier, OpConfig] = Field(default_factory=dict)
    aliases: Sequence[RepoId] = ()
    include: Sequence[KernelName] = ()


class Config(Model):
    """`build.toml`."""

    general: General
    tpu: TpuConfig | None = None


@dataclass(frozen=True)
class Project:
    """A kernel's source, read and checked: its configuration, its card and the files of its package."""

    config: Config
    card: bytes
    package: dict[str, bytes]


def read_project(source: Path) -> Project:
    """Reads the kernel source in `source`.

    Raises:
        InvalidMetadataError: Its `build.toml` is missing or malformed.
        BuildError: Its card or package is missing, or a kernel may not be made of what is in the package.
    """
    config = _read_config(source / CONFIG_FILE)
    if "tpu" not in config.general.backends:
        raise BuildError(
            f"{source / CONFIG_FILE}: general.backends: 'tpu' is not in {config.general.backends}; add it"
        )
    card = source / CARD_FILE
    if not card.is_file() or card.is_symlink():
        raise BuildError(f"{card} is missing; describe there what the kernel does, its limits and its use")
    folder = source / "torch-ext" / config.general.python_name
    if folder.is_symlink() or folder.parent.is_symlink():
        raise BuildError(f"{folder} is or lies in a symbolic link; a kernel holds regular files only")
    if not (folder / "__init__.py").is_file():
        raise BuildError(f"{folder / '__init__.py'} is missing; by general.name the package lies there")
    return Project(config, card.read_bytes(), read_package(folder))


def read_package(folder: Path) -> dict[str, bytes]:
    """The files of a package that travel in a kernel; its tests, bytecode and hidden files do not.

    Raises:
        BuildError: A file is a link, no Python, or imports this library: a kernel runs without it.
    """
    contents = {}
    for relative, path in list_files(folder, BuildError).items():
        parts = relative.split("/")
        if "tests" in parts[:-1] or any(part.startswith(".") for part in parts) or path.suffix == ".pyc":
            continue
        contents[relative] = path.read_bytes()
        if path.suffix == ".py":
            _check_self_contained(contents[relative], path)
    return contents


def _read_config(path: Path) -> Config:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidMetadataError(f"{path} is missing; it names the kernel and what it provides") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidMetadataError(f"{path}: {error}") from error
    return parse_object(Config, data, str(path))


def _check_self_contained(code: bytes, path: Path) -> None:
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError) as error:
        raise BuildError(f"{path}: {error}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            modules = [node.module]
        else:
            continue
        for module in modules:
            if module.partition(".")[0] == "tpu_kernels":
                raise BuildError(
                    f"{path}:{node.lineno}: it imports {module!r}, but a kernel runs without tpu-kernels; "
                    "the build puts a copy of tpu_kernels.ops into it: from .tpu_ops import ..."
                )
