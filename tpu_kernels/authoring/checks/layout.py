"""What can be told of a kernel's source without reading its code: its metadata, its card, its tables."""

from __future__ import annotations

from collections.abc import Iterator

from ...analysis.target import GENERATIONS
from ...errors import TpuKernelsError
from ..builder import assemble
from ..project import CONFIG_FILE, Config
from .report import Finding
from .subject import Subject

_MOST_KNOWN = ", ".join(GENERATIONS)


def check_layout(subject: Subject) -> Iterator[Finding]:
    """Metadata and layout: the kernel can be built, and says where it runs."""
    try:
        assemble(subject.source)
    except TpuKernelsError as error:
        yield Finding("error", str(error))
        return
    config = subject.project.config
    if config.tpu is None:
        yield Finding(
            "warning", "there is no [tpu] table: nothing is known of its ops and generations", CONFIG_FILE
        )
        return
    yield from _generations(subject, config)
    if "reference.py" not in subject.project.package and config.tpu.ops:
        package = f"torch-ext/{config.general.python_name}"
        yield Finding(
            "warning", "the package has no reference.py: write there what each op computes", package
        )


def _generations(subject: Subject, config: Config) -> Iterator[Finding]:
    line = subject.line_in(CONFIG_FILE, "generations")
    if not subject.generations:
        yield Finding(
            "error",
            f"tpu.generations is missing: name those that the kernel is made for, of {_MOST_KNOWN}",
            CONFIG_FILE,
            line,
        )
    for generation in subject.generations:
        if generation not in GENERATIONS:
            yield Finding(
                "error",
                f"tpu.generations: there is no TPU {generation!r}; there are {_MOST_KNOWN}",
                CONFIG_FILE,
                line,
            )
