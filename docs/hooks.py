"""Pages that are made of something else: one a kernel, of its card and its figures, and one a public module.

`figures.json` is the facts.json of `tpu-kernels dashboard`.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import tpu_kernels
from tpu_kernels.dashboard.facts import Facts, Run

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
    return f"{title}\n\n| | |\n|---|---|\n{rows}\n{rest}\n{_figures(general.get('hub', {}).get('repo-id'))}"


def _figures(name: str | None) -> str:
    """What the compiler and the simulator said of a kernel's calls, when they were last asked."""
    facts = Facts.model_validate_json((ROOT / "docs" / "figures.json").read_bytes())
    runs = [run for kernel in facts.kernels if kernel.name == name for run in kernel.runs]
    if not runs:
        return ""
    versions = ", ".join(f"{package} {version}" for package, version in facts.versions.items())
    table = "".join(map(_row, runs))
    return (
        f"## Figures\n\nOf {facts.made[:10]}, with {versions}. Simulated: nothing was run on a TPU "
        "([what the figures say](../evidence.md)). The floor is what the call's bytes or flops take at least; a call "
        f"of a few µs is mostly its start.\n\n| call | TPU | time | floor | VMEM |\n|---|---|---:|---:|---:|\n{table}"
    )


def _row(run: Run) -> str:
    times = [run.reason.partition(":")[0], ""]
    if run.time_ms is not None and run.floor_ms is not None:
        times = [f"{value * 1e3:.3g} µs" for value in (run.time_ms, run.floor_ms)]
    vmem = "" if run.vmem_bytes is None else f"{run.vmem_bytes / 2**20:.1f} MiB"
    return f"| `{run.op}` {run.case} | {run.generation} | {' | '.join(times)} | {vmem} |\n"
