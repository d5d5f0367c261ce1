"""Pages that are made of something else: one a kernel, of its card, and one a public module, of its docstrings."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import tpu_kernels

ROOT = Path(__file__).parents[1]
MODULES = {
    "tpu_kernels": "Load and enable",
    "tpu_kernels.analysis": "Compile and simulate",
    "tpu_kernels.tuning": "Tune",
    "tpu_kernels.ops": "Ops",
    "tpu_kernels.authoring": "Build",
    "tpu_kernels.emulation": "The emulated device",
    "tpu_kernels.projection": "Projection",
    "tpu_kernels.testing": "A Hub for tests",
    "tpu_kernels.errors": "Errors",
}
_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)


def on_config(config: Any) -> Any:
    """Puts the pages that are made into the navigation."""
    for section in config.nav:
        if "Kernels" in section:
            section["Kernels"] = [{path.parent.name: _kernel_page(path)} for path in _cards()]
        if "Reference" in section:
            section["Reference"] += [{title: f"reference/{name}.md"} for name, title in MODULES.items()]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Makes them."""
    for card in _cards():
        files.append(File.generated(config, _kernel_page(card), content=_kernel(card)))
    for name, title in MODULES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=_module(name, title)))
    return files


def _module(name: str, title: str) -> str:
    text = f"# {title}\n\n`{name}`\n\n::: {name}\n"
    if name == tpu_kernels.__name__:
        # Its names are loaded when they are used, which is more than can be read from its source.
        functions = [getattr(tpu_kernels, each) for each in tpu_kernels.__all__ if each != "__version__"]
        root = "    options: {show_root_heading: true, show_root_toc_entry: true}\n"
        text += "".join(f"\n::: {each.__module__}.{each.__qualname__}\n{root}" for each in functions)
    return text


def _cards() -> list[Path]:
    return sorted((ROOT / "kernels_src").glob("*/README.md"))


def _kernel_page(card: Path) -> str:
    return f"kernels/{card.parent.name}.md"


def _kernel(card: Path) -> str:
    """The card, with what its build.toml says below the title."""
    project = tomllib.loads((card.parent / "build.toml").read_text())
    general, tpu = project["general"], project["tpu"]
    facts = [
        ("repository", f"`{general['hub']['repo-id']}`" if "hub" in general else f"`{general['name']}`"),
        ("version", str(general["version"])),
        ("generations", ", ".join(tpu["generations"])),
        ("requires", ", ".join(f"{name} {needed}" for name, needed in tpu.get("requires", {}).items())),
        ("registers as", ", ".join(f"{table}: {', '.join(into)}" for table, into in tpu["provides"].items())),
    ]
    rows = "".join(f"| {name} | {value} |\n" for name, value in facts if value)
    title, _, rest = _FRONT_MATTER.sub("", card.read_text()).lstrip().partition("\n")
    return f"{title}\n\n| | |\n|---|---|\n{rows}\n{rest}"
