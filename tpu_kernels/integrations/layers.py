"""Stock `kernels`: layers of this library's kernels, for the kernelizable layers of transformers on device tpu.

Stock replaces a layer's `forward` by the one that its mapping names. A kernel says in its metadata which layers it
provides (``kernels.layers``).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import IntegrationError
from ..hub import find_loaded, get_kernel

if TYPE_CHECKING:
    import torch

LAYERS_KERNELS = tuple(
    (f"tpu-kernels/{name}", 1) for name in ("gated-activation", "rms-norm", "rotary", "router")
)
LAYERS_POINT = "kernels.layers"


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
    if importlib.util.find_spec("kernels") is None:
        raise IntegrationError("stock kernels is not installed; install it with: pip install kernels")
    from kernels import register_kernel_mapping

    mapping = {}
    for repo_id, version in LAYERS_KERNELS:
        loaded = find_loaded(get_kernel(repo_id, version=version))
        assert loaded is not None
        for name in loaded.metadata.tpu.provides.get(LAYERS_POINT, {}) if loaded.metadata.tpu else ():
            mapping[name] = {"tpu": _Layer(repo_id, version, name)}
    register_kernel_mapping(mapping, inherit_mapping=True)
    return tuple(mapping)


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
