"""Starting a kernel: a complete small one, from a template.

A template is a folder in `templates/` beside `common/`, whose files it adds to. Files are copied as they are, but for
those that end in `.jinja`, which are rendered with what `template.toml` says. The folder `package` gets the kernel's
name.
"""

from __future__ import annotations

import keyword
import tomllib
from pathlib import Path
from typing import Any

from ..errors import BuildError
from ..files import replace_folder
from ..hub.layout import list_files
from ..hub.metadata import parse_object
from .project import General

_TEMPLATES = Path(__file__).with_name("templates")
_COMMON, _CONFIG, _PACKAGE, _RENDERED = "common", "template.toml", "package", ".jinja"
_GENERATIONS = ("v4", "v5e", "v5p", "v6e", "tpu7x")


def templates() -> dict[str, str]:
    """The templates, with what each makes.

    Example:
        >>> list(templates())
        ['attention', 'elementwise', 'experts', 'layer', 'matmul']
    """
    found = {}
    for config in sorted(_TEMPLATES.glob(f"*/{_CONFIG}")):
        found[config.parent.name] = tomllib.loads(config.read_text(encoding="utf-8"))["summary"]
    return found


def init(name: str, template: str = "elementwise", folder: str | Path | None = None) -> Path:
    """Writes the source of a new kernel, which passes `check` as it is, and returns its folder.

    Args:
        name: The kernel's name, or `organisation/name`; without, the organisation is `my-organisation`.
        template: One of `templates()`.
        folder: Where to; unless given, a folder of the kernel's name here. It must be new or empty.

    Raises:
        InvalidMetadataError: The name cannot be one.
        BuildError: There is no such template, or the folder holds something.

    Example:
        >>> from tpu_kernels.authoring import init
        >>> init("acme/fast-norm", template="layer")  # doctest: +SKIP
        PosixPath('fast-norm')
    """
    if template not in templates():
        raise BuildError(f"there is no template {template!r}; there are {', '.join(templates())}")
    organisation, _, short = name.rpartition("/")
    repo_id = f"{organisation or 'my-organisation'}/{short}"
    general = _general(repo_id, short)
    folder = Path(short if folder is None else folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BuildError(f"{folder} is there already; give a new folder with --out")
    values = {"name": short, "organisation": repo_id.partition("/")[0], "python_name": general.python_name}
    replace_folder(folder, _files(template, values), BuildError)
    return folder


def _general(repo_id: str, name: str) -> General:
    """What the kernel's `build.toml` will say of it."""
    data = {
        "name": name,
        "version": 1,
        "license": "Apache-2.0",
        "backends": ["tpu"],
        "hub": {"repo-id": repo_id},
    }
    general = parse_object(General, data, f"the new kernel {name!r}")
    if keyword.iskeyword(general.python_name):
        raise BuildError(
            f"{name!r} cannot be a kernel's name: {general.python_name} means something in Python"
        )
    return general


def _files(template: str, values: dict[str, Any]) -> dict[str, bytes]:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)

    def rendered(text: bytes, values: dict[str, Any]) -> str:
        return environment.from_string(text.decode()).render(values)

    config = (_TEMPLATES / template / _CONFIG).read_bytes()
    defaults = {"generations": _GENERATIONS, "provides": {}, "layers": False, "function": None}
    values = {**defaults, **values, **tomllib.loads(rendered(config, values))}
    files = {}
    for part in (_COMMON, template):
        for path, file in list_files(_TEMPLATES / part, BuildError).items():
            if path == _CONFIG:
                continue
            target = "/".join(values["python_name"] if each == _PACKAGE else each for each in path.split("/"))
            content = file.read_bytes()
            if path.endswith(_RENDERED):
                content = rendered(content, values).encode()
            files[target.removesuffix(_RENDERED)] = content
    return files
