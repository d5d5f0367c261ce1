"""Whether stock `kernels` loads the build."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
from collections.abc import Iterator
from types import ModuleType

from ...hub.layers import read_layers
from .report import Finding
from .subject import NotRun, Subject

_ALLOWED = {"has_backward", "can_torch_compile"}


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
    for layer in read_layers(subject.project.package):
        members = {name for name, _ in inspect.getmembers(getattr(module.layers, layer.name))}
        own = sorted(members - {name for name, _ in inspect.getmembers(torch.nn.Module)} - _ALLOWED)
        if own or getattr(module.layers, layer.name).__init__ is not torch.nn.Module.__init__:
            extra = ", ".join(own) or "__init__"
            yield subject.error(
                f"stock kernels takes no layer with members of its own, and {layer.name} has {extra}: a layer is its "
                "forward, which uses what the model's module has",
                getattr(module.layers, layer.name).forward,
            )
    yield Finding("note", f"stock kernels {importlib.metadata.version('kernels')} loads it")
