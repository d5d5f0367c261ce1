"""diffusers: the attention kernel as a backend of its attention dispatcher."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..errors import IntegrationError
from ..log import warn_once
from .attention import provided

POINT = "diffusers.attention"
BACKEND = "tpu_kernels"


def enable_diffusers(model: Any = None) -> str:
    """Registers the attention kernel with diffusers as the backend "tpu_kernels"; `disable` takes it out again.

    From then on ``pipe.transformer.set_attention_backend("tpu_kernels")`` and diffusers' context manager
    ``attention_backend("tpu_kernels")`` know it. Models whose attention does not pass the dispatcher, such as Stable
    Diffusion 3 in diffusers 0.42, keep their own, as with every backend.

    Args:
      model: a diffusers model, switched to it at once.

    Returns: the backend's name.

    Raises:
      IntegrationError: diffusers is missing, or has no such dispatcher.

    Example:
      >>> pipe = FluxPipeline.from_pretrained("black-forest-labs/FLUX.1-dev")  # doctest: +SKIP
      >>> tpu_kernels.enable_diffusers(pipe.transformer)  # doctest: +SKIP
      'tpu_kernels'
    """
    dispatch = _dispatch()
    names: Any = dispatch.AttentionBackendName
    if BACKEND not in names._value2member_map_:
        function = provided(POINT)
        # The dispatcher knows its backends by members of an enumeration, which has no way to add one.
        member = str.__new__(names, BACKEND)
        member._name_, member._value_ = BACKEND.upper(), BACKEND
        names._member_map_[member._name_] = names._value2member_map_[BACKEND] = member
        names._member_names_.append(member._name_)
        dispatch._AttentionBackendRegistry.register(member)(function)
    if model is not None:
        processors = [getattr(module, "processor", None) for module in model.modules()]
        if not any(hasattr(processor, "_attention_backend") for processor in processors):
            warn_once(
                f"{type(model).__name__} keeps its own attention: it does not pass diffusers' dispatcher"
            )
        model.set_attention_backend(BACKEND)
    return BACKEND


def unregister() -> None:
    """Takes the backend out of diffusers' dispatcher, if it is there; what used it goes to the native one."""
    import sys

    dispatch: Any = sys.modules.get("diffusers.models.attention_dispatch")
    if dispatch is None or BACKEND not in dispatch.AttentionBackendName._value2member_map_:
        return
    names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    member = names(BACKEND)
    if registry._active_backend == member:
        registry.set_active_backend(names.NATIVE)
    # Models that were switched keep the member: for them it computes natively.
    registry._backends[member] = registry._backends[names.NATIVE]
    registry._supported_arg_names[member] = registry._supported_arg_names[names.NATIVE]
    del names._member_map_[member._name_], names._value2member_map_[BACKEND]
    names._member_names_.remove(member._name_)


def _dispatch() -> ModuleType:
    try:
        from diffusers.models import attention_dispatch
    except ImportError as error:
        raise IntegrationError(
            f"diffusers has no attention dispatcher here ({error}); pip install 'tpu-kernels[diffusers]'"
        ) from None
    found: ModuleType = attention_dispatch
    return found
