"""Stock `kernels`: layers of this library's kernels, for the kernelizable layers of transformers on device tpu.

Stock replaces a layer's `forward` by the one that its mapping names. A kernel says in its metadata which layers it
provides (``kernels.layers``).
"""

from __future__ import annotations

import importlib.util
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import IntegrationError
from ..hub import find_loaded, get_kernel

if TYPE_CHECKING:
    import torch

LAYERS_KERNELS = tuple(
    (f"tpu-kernels/{name}", 1) for name in ("gated-activation", "rms-norm", "rotary", "router")
)
LAYERS_POINT = "kernels.layers"
# Those that compiled programs gain by, in decode or in prefill: docs/small-kernels.md.
GAINING = ("RMSNorm", "RMSNormZeroCentered", "rotary_pos_emb", "SoftmaxTopKRouter")


def register_layers() -> tuple[str, ...]:
    """Tells stock `kernels` of this library's layers for device tpu, and returns their names.

    `kernels.kernelize(model, mode=..., device="tpu")` then uses them, and so does transformers with `use_kernels=True`
    where the installed versions of both go together. What was registered for other devices stays.

    Raises:
        IntegrationError: Stock `kernels` is not installed.

    Example:
        >>> from tpu_kernels.integrations.layers import register_layers
        >>> register_layers()  # doctest: +SKIP
        ('SiluAndMul', ..., 'RMSNorm', 'RMSNormZeroCentered', 'rotary_pos_emb', 'SoftmaxTopKRouter')
    """
    _need_stock()
    from kernels import register_kernel_mapping

    mapping = _mapping()
    register_kernel_mapping(mapping, inherit_mapping=True)
    return tuple(mapping)


def replace_layers(model: torch.nn.Module) -> str:
    """Puts the kernels that gain into a model's kernelizable layers, by stock `kernels`, and says which.

    A function such as `apply_rotary_pos_emb` is there once for all models of a class, which all have the kernel then.

    Raises:
        IntegrationError: Stock `kernels` is not installed.
    """
    _need_stock()
    from kernels import Mode, kernelize, use_kernel_mapping

    mapping = {name: of for name, of in _mapping().items() if name in GAINING}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="tpu")
    replaced = [part for part in _kernelizable(model) if "forward" in vars(part)]
    if not replaced:
        return (
            f"no layer of {type(model).__name__} is kernelizable as {', '.join(GAINING)} here: transformers marks them "
            "where stock kernels is of a version that it knows"
        )
    _replaced[model] = replaced
    counts = Counter(type(part).kernel_layer_name for part in replaced)
    return f"layers: {', '.join(f'{count} x {name}' for name, count in counts.items())}"


def restore_layers(model: torch.nn.Module | None = None) -> None:
    """Gives the layers of `model`, or of every model, their own code back."""
    for each in [model] if model is not None else list(_replaced):
        for part in _replaced.pop(each, ()):
            vars(part).pop("forward", None)


_replaced: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def _kernelizable(model: torch.nn.Module) -> Iterator[Any]:
    """The modules of a model, and the functions in them, that may have a kernel of ours."""
    seen = set()
    for module in model.modules():
        for part in (module, *getattr(module, "_kernel_funcs", {}).values()):
            if getattr(type(part), "kernel_layer_name", None) in GAINING and id(part) not in seen:
                seen.add(id(part))
                yield part


def _need_stock() -> None:
    if importlib.util.find_spec("kernels") is None:
        raise IntegrationError("stock kernels is not installed; install it with: pip install kernels")


def _mapping() -> dict[str, dict[str, _Layer]]:
    """The layers for device tpu, as stock's mappings hold them."""
    mapping = {}
    for repo_id, version in LAYERS_KERNELS:
        loaded = find_loaded(get_kernel(repo_id, version=version))
        assert loaded is not None
        for name in loaded.metadata.tpu.provides.get(LAYERS_POINT, {}) if loaded.metadata.tpu else ():
            mapping[name] = {"tpu": _Layer(repo_id, version, name)}
    return mapping


@dataclass(frozen=True)
class _Layer:
    """A layer as stock's mappings hold it, loaded by this library: a build has one loader in a process."""

    repo_id: str
    version: int
    layer_name: str

    def load(self) -> type[torch.nn.Module]:
        """The layer's class."""
        layer: type[torch.nn.Module] = getattr(
            get_kernel(self.repo_id, version=self.version).layers, self.layer_name
        )
        return layer
