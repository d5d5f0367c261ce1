"""Stock `kernels`: layers of this library's kernels, for the kernelizable layers of transformers on device tpu.

Stock replaces a layer's `forward` by the one that its mapping names. A kernel says in its metadata which layers it
provides (``kernels.layers``).
"""

from __future__ import annotations

import importlib.util

from ..errors import IntegrationError
from ..hub import install_kernel
from ..hub.layout import METADATA_FILE
from ..hub.metadata import Metadata, parse_json

LAYERS_KERNELS = (("tpu-kernels/rms-norm", 1), ("tpu-kernels/router", 1))
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
        ('RMSNorm', 'RMSNormZeroCentered', 'SoftmaxTopKRouter')
    """
    if importlib.util.find_spec("kernels") is None:
        raise IntegrationError("stock kernels is not installed; install it with: pip install kernels")
    from kernels import LocalLayerRepository, register_kernel_mapping

    mapping = {}
    for repo_id, version in LAYERS_KERNELS:
        variant = install_kernel(repo_id, version=version)
        metadata = parse_json(Metadata, (variant / METADATA_FILE).read_bytes(), str(variant))
        for name in metadata.tpu.provides.get(LAYERS_POINT, {}) if metadata.tpu else ():
            mapping[name] = {"tpu": LocalLayerRepository(variant.parents[1], layer_name=name)}
    register_kernel_mapping(mapping, inherit_mapping=True)
    return tuple(mapping)
