"""The kernel hub: finds a kernel, proves that it is the right one, and loads it.

Data flows through one module a stage, each of which knows only those before it::

    reference -> sources -> resolve -> verify -> load

Which sources there are and in which order they are asked is `configuration`'s to say: overrides (`sources`), a
lock (`lock_source`), the shipped registry or any folder (`sources`), a bucket (`bucket`), the Hub (`hub_source`,
on top of `client` for requests, `cache` for what was fetched, `trust` for whom to believe). `resolve` chooses by
the build's name (`variants`) and by what it needs (`compatibility`). `api` and `locked` are what programs call.

Importing this package loads neither torch nor jax nor huggingface_hub.
"""

from __future__ import annotations

from .api import (
    explain,
    get_kernel,
    get_loaded_kernels,
    get_local_kernel,
    has_kernel,
    install_kernel,
)
from .explanation import Decision, Explanation
from .load import LoadedKernel, RepoInfo, find_loaded
from .locked import get_locked_kernel, load_kernel
from .sources import registry_root

__all__ = [
    "Decision",
    "Explanation",
    "LoadedKernel",
    "RepoInfo",
    "explain",
    "find_loaded",
    "get_kernel",
    "get_loaded_kernels",
    "get_local_kernel",
    "get_locked_kernel",
    "has_kernel",
    "install_kernel",
    "load_kernel",
    "registry_root",
]
