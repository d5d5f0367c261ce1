"""transformers' attention: the kernel's function and its mask function in transformers' tables."""

from __future__ import annotations

import weakref
from typing import Any

from ..errors import IntegrationError

# What `enable(attention=True)` loads: the version that this release was tested with.
KERNEL = ("tpu-kernels/attention", 1)
POINT = "transformers.attention"
NAME = "tpu_attention"

# What each switched model used before, by sub-config; the model itself under "".
_former: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_registered: list[str] = []


def register() -> str:
    """Makes the kernel known to transformers as an ``attn_implementation``; returns its name.

    The mask function goes with it: without one, transformers makes no mask, and outputs are wrong without a word.
    """
    if not _registered:
        function = provided(POINT)
        for table, entry in zip(_tables(), (function, function.mask), strict=True):
            table.register(NAME, entry)
        _registered.append(NAME)
    return NAME


def unregister() -> None:
    """Takes the name out of transformers' tables, and gives every switched model its former attention back."""
    for model in list(_former):
        restore(model)
    if _registered:
        for table in _tables():
            table._global_mapping.pop(NAME, None)
        _registered.clear()


def switch(model: Any) -> bool:
    """Switches `model` to the kernel; whether transformers lets it."""
    former = {"": model.config._attn_implementation}
    for key in model.config.sub_configs:
        inner = getattr(model.config, key, None)
        if inner is not None:
            former[key] = inner._attn_implementation
    model.set_attn_implementation(NAME)
    switched: bool = model.config._attn_implementation == NAME
    if switched and former[""] != NAME:
        _former.setdefault(model, former)
    return switched


def restore(model: Any) -> None:
    """Gives `model` the attention it had before `switch`."""
    former = _former.pop(model, None)
    if former is not None:
        model.set_attn_implementation(former)


def provided(point: str) -> Any:
    """What the kernel is used as at an extension point."""
    from ..device import keep_jax_off_tpu
    from ..hub import find_loaded, get_kernel

    keep_jax_off_tpu()
    repo_id, version = KERNEL
    module = get_kernel(repo_id, version=version)
    record = find_loaded(module)
    assert record is not None
    assert record.metadata.tpu is not None
    names = record.metadata.tpu.provides.get(point, {})
    if "attention" not in names:
        raise IntegrationError(f"{repo_id} v{version} provides no {point}.attention; install a newer release")
    return getattr(module, names["attention"])


def _tables() -> tuple[Any, Any]:
    from transformers import AttentionInterface, AttentionMaskInterface

    return AttentionInterface, AttentionMaskInterface
