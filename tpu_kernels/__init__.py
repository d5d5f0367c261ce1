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
    from .hub import explain as explain
    from .hub import get_kernel as get_kernel
    from .hub import get_loaded_kernels as get_loaded_kernels
    from .hub import get_local_kernel as get_local_kernel
    from .hub import get_locked_kernel as get_locked_kernel
    from .hub import has_kernel as has_kernel
    from .hub import install_kernel as install_kernel
    from .hub import load_kernel as load_kernel
    from .integrations.distributed import distributed_config as distributed_config
    from .integrations.transformers import disable as disable
    from .integrations.transformers import enable as enable

_EXPORTS = {
    "disable": "integrations.transformers",
    "distributed_config": "integrations.distributed",
    "enable": "integrations.transformers",
    "explain": "hub",
    "get_kernel": "hub",
    "get_loaded_kernels": "hub",
    "get_local_kernel": "hub",
    "get_locked_kernel": "hub",
    "has_kernel": "hub",
    "install_kernel": "hub",
    "load_kernel": "hub",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'tpu_kernels' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
