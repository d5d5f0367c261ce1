"""torch_tpu, started on the adapted plugin and mended where it takes libtpu for granted."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from jax._src.pallas.mosaic import tpu_info
from jax.experimental.pallas import tpu as pltpu
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch_tpu import _loader
from torch_tpu._internal.pallas import pallas
from torch_tpu._internal.utils import hardware

from . import standins

_XLA_OPTIONS = "TORCH_TPU_INTERNAL_XLA_OPTIONS"


def load(quiet: bool) -> None:
    """Starts torch_tpu, which came up without a device when torch was imported since the machine has none.

    Example:
        >>> load(quiet=True)  # doctest: +SKIP
    """
    hardware.get_tpu_device_count = lambda: 1
    if quiet:
        # All that the loader prints is a report, on stderr, of what it registers.
        _loader.print = lambda *args, **kwargs: None
    # XLA:CPU turns the scans that cumsum and its kin are lowered to into fused reduce-windows that its own
    # emitter aborts the process on. Without that pass they become plain loops.
    options = [os.environ.get(_XLA_OPTIONS, ""), "xla_disable_hlo_passes=associative-scan-rewriter"]
    os.environ[_XLA_OPTIONS] = " ".join(filter(None, options))
    _loader.load()
    _disable_graph_cache()
    # The `kernels` library takes a process that lacks it for one without a TPU.
    if not hasattr(torch.backends, "tpu"):
        torch.backends.tpu = ModuleType("torch.backends.tpu")  # type: ignore[attr-defined]
    # Pallas asks for the chip's properties even to interpret a kernel (`emit_pipeline`). Any chip's will do.
    tpu_info.registry["cpu"] = lambda: tpu_info.get_tpu_info_for_chip(tpu_info.ChipVersion.TPU_V5E, 1)
    _interpret_kernels()
    standins.register()


def _interpret_kernels() -> None:
    """Has `torch_tpu`'s `jax_op`, by which kernels of others come, trace Pallas kernels to be interpreted."""
    prepare = pallas.JaxCallable.__init__

    @functools.wraps(prepare)
    def prepare_interpreted(self: Any, *args: Any, **kwargs: Any) -> None:
        prepare(self, *args, **kwargs)
        self.exported = _interpreted(self.exported)

    pallas.JaxCallable.__init__ = prepare_interpreted


def _interpreted(trace: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(trace)
    def interpreted(*args: Any, **kwargs: Any) -> Any:
        # The plain interpreter. The one that simulates a TPU's memories calls back into Python, and such
        # calls a module that is handed to torch_tpu cannot hold.
        with pltpu.force_tpu_interpret_mode(True):  # type: ignore[arg-type]
            return trace(*args, **kwargs)

    return interpreted


def _disable_graph_cache() -> None:
    """Keeps compiled graphs out of AOTAutograd's cache on disk.

    Its keys do not tell this device's executables from a TPU's. And the plugin cannot serialise all of them
    (none with a sort: a warning each time), nor load back all that it serialised ("Function not found").
    """
    functorch_config.enable_autograd_cache = False
    AOTAutogradCache.save = staticmethod(lambda *args, **kwargs: None)  # type: ignore[method-assign]
