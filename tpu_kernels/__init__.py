"""tpu-kernels: the kernel hub for Google TPUs in PyTorch.

Three lines speed a model up::

    import tpu_kernels
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", device_map="tpu")
    print(tpu_kernels.enable(model))

Importing this package is cheap: torch, jax and transformers are loaded by the functions that need them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .generation.cache import StaticCache as StaticCache
    from .generation.loop import decode as decode
    from .generation.loop import generate as generate
    from .generation.warm import warm as warm
    from .hub import explain as explain
    from .hub import get_kernel as get_kernel
    from .hub import get_loaded_kernels as get_loaded_kernels
    from .hub import get_local_kernel as get_local_kernel
    from .hub import get_locked_kernel as get_locked_kernel
    from .hub import has_kernel as has_kernel
    from .hub import install_kernel as install_kernel
    from .hub import load_kernel as load_kernel
    from .integrations.diffusers import enable_diffusers as enable_diffusers
    from .integrations.distributed import distributed_config as distributed_config
    from .integrations.transformers import disable as disable
    from .integrations.transformers import enable as enable

_EXPORTS = {
    "StaticCache": "generation.cache",
    "decode": "generation.loop",
    "disable": "integrations.transformers",
    "distributed_config": "integrations.distributed",
    "enable": "integrations.transformers",
    "enable_diffusers": "integrations.diffusers",
    "explain": "hub",
    "generate": "generation.loop",
    "get_kernel": "hub",
    "get_loaded_kernels": "hub",
    "get_local_kernel": "hub",
    "get_locked_kernel": "hub",
    "has_kernel": "hub",
    "install_kernel": "hub",
    "load_kernel": "hub",
    "warm": "generation.warm",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'tpu_kernels' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
