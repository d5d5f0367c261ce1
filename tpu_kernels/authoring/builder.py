"""Building: from a kernel's source to the artifact of the Hub, the same bytes every time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BuildError
from ..files import replace_folder
from ..hub.layers import read_layers
from ..hub.layout import CARD_FILE, METADATA_FILE, VARIANT, digest, dump_json
from ..hub.metadata import Metadata, parse_json
from .project import Config, Project, read_package, read_project

OPS_FOLDER = Path(__file__).resolve().parents[1] / "ops"
_OPS_PACKAGE = "tpu_ops"
# What an included kernel finds in the place of its own copy of the ops: the one of the kernel that includes it.
_SHARED_OPS = b"from ...tpu_ops import *\nfrom ...tpu_ops import tables\n"
_COMPAT_MODULE = Path(__file__).with_name("templates") / "compat.py"


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel that was built: what it is, and the files of its repository by relative path."""

    repo_id: str
    aliases: tuple[str, ...]
    metadata: Metadata
    files: dict[str, bytes]

    @property
    def metadata_file(self) -> bytes:
        """The content of its `metadata.json`."""
        return self.files[f"build/{VARIANT}/{METADATA_FILE}"]


def build(source: str | Path, out: str | Path) -> BuiltKernel:
    """Builds the kernel source in `source` and writes the kernel repository to `out`.

    The same source gives the same bytes. `out` may be missing, empty or a former build, which is replaced;
    a build that fails leaves it as it was.

    Raises:
        InvalidMetadataError: `build.toml` is malformed.
        BuildError: The source is incomplete or holds what a kernel may not, or `out` holds something else.

    Example:
        >>> from tpu_kernels.authoring import build
        >>> build("kernels_src/ragged-dot", "dist/ragged-dot").metadata.id  # doctest: +SKIP
        '_ragged_dot_tpu_3f9a41c07b52'
    """
    kernel = assemble(Path(source))
    _check_replaceable(Path(out))
    replace_folder(Path(out), kernel.files, BuildError)
    return kernel


def assemble(source: Path, provenance: Mapping[str, Any] | None = None) -> BuiltKernel:
    """Builds the kernel source in `source`, in memory; `provenance` is put into its metadata, and changes no id."""
    project = read_project(source)
    config = project.config
    _check_layers(source, project.package)
    contents = dict(project.package)
    _add(contents, source, _OPS_PACKAGE, read_package(OPS_FOLDER))
    for name in config.tpu.include if config.tpu else ():
        included = _included(source, name)
        _add(contents, source, included.config.general.python_name, included.package)
    _add(contents, source, config.general.python_name, {"__init__.py": _COMPAT_MODULE.read_bytes()})
    metadata = _metadata(config, contents, provenance)
    files = {f"build/{VARIANT}/{path}": content for path, content in contents.items()}
    files[f"build/{VARIANT}/{METADATA_FILE}"] = metadata
    files[CARD_FILE] = project.card
    return BuiltKernel(
        repo_id=config.general.hub.repo_id,
        aliases=tuple(config.tpu.aliases) if config.tpu else (),
        metadata=parse_json(Metadata, metadata, str(source / METADATA_FILE)),
        files=dict(sorted(files.items())),
    )


def _check_layers(source: Path, package: dict[str, bytes]) -> None:
    for layer in read_layers(package):
        if layer.has_backward is None:
            raise BuildError(
                f"{source}: the layer {layer.name} does not say whether it has a gradient, and stock kernels would "
                "train with it either way; add has_backward = True or has_backward = False to the class"
            )


def _add(contents: dict[str, bytes], source: Path, package: str, files: dict[str, bytes]) -> None:
    for path in contents:
        if path in (f"{package}.py", METADATA_FILE) or path.startswith(f"{package}/"):
            raise BuildError(f"{source}: the package holds {path}, which the build writes itself; rename it")
    contents.update({f"{package}/{path}": content for path, content in files.items()})


def _included(source: Path, name: str) -> Project:
    """The kernel `name` beside `source`, to be a part of it."""
    project = read_project(source.resolve().parent / name)
    if project.config.tpu is not None and project.config.tpu.include:
        raise BuildError(
            f"{source}: tpu.include: {name} includes {', '.join(project.config.tpu.include)} itself; include only "
            "kernels that include none"
        )
    _add(project.package, source.parent / name, _OPS_PACKAGE, {"__init__.py": _SHARED_OPS})
    return project


def _metadata(config: Config, contents: dict[str, bytes], provenance: Mapping[str, Any] | None) -> bytes:
    data: dict[str, Any] = {
        "name": config.general.name,
        "version": config.general.version,
        "license": config.general.license,
        # Stock `kernels` knows a closed list of packages here, without jax: see tpu.requires.
        "python-depends": [],
        "backend": {"type": "tpu"},
        "digest": {
            "algorithm": "sha256",
            "files": {path: digest(content, "sha256") for path, content in contents.items()},
        },
    }
    if config.tpu is not None:
        data["tpu"] = config.tpu.model_dump(by_alias=True, exclude={"aliases", "include"})
    # The id is the module's name and its ops' namespace: taken from all of the content, two builds that
    # differ never share one.
    content_id = hashlib.sha256(dump_json(data)).hexdigest()[:12]
    data["id"] = f"_{config.general.python_name}_tpu_{content_id}"
    return dump_json(data | ({"provenance": dict(provenance)} if provenance else {}))


def _check_replaceable(out: Path) -> None:
    if not out.exists():
        return
    if out.is_dir():
        build_folder = out / "build"
        variants = {path.name for path in build_folder.iterdir()} if build_folder.is_dir() else set()
        if {path.name for path in out.iterdir()} <= {CARD_FILE, "build"} and variants <= {VARIANT}:
            return
    raise BuildError(f"{out} is no former build, and building would replace it; give a new folder")
