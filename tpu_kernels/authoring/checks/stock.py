"""Whether stock `kernels` loads the build."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from types import ModuleType

from .report import Finding
from .subject import NotRun, Subject


def check_stock(subject: Subject) -> Iterator[Finding]:
    """Stock `kernels`: loads the build, with what the package exports."""
    if importlib.util.find_spec("kernels") is None:
        raise NotRun("stock kernels is not installed: pip install kernels")
    import torch

    # Stock takes a process for a TPU's by this attribute, which torch_tpu does not set.
    torch.backends.tpu = ModuleType("torch.backends.tpu")  # type: ignore[attr-defined]
    import kernels

    module = kernels.get_local_kernel(subject.build)
    for name in getattr(module, "__all__", ()):
        if not hasattr(module, name):
            yield subject.error(f"stock kernels finds no {name!r}, which __all__ promises")
    yield Finding("note", f"stock kernels {importlib.metadata.version('kernels')} loads it")
