"""A TPU without a TPU: the real torch_tpu, on an XLA:CPU plugin in libtpu's place.

`torch.device("tpu")` then works on any x86-64 Linux machine, in eager mode, with autograd, under
`torch.compile(backend="tpu")`, for whole models. Down to the StableHLO it is the real thing; only what
compiles and runs that is the CPU's. It shows whether a program is right, not how fast it is. A process has
one such device.

Three ways in::

    tpu-kernels emulate script.py --its --own=arguments
    TPU_KERNELS_EMULATE=1 pytest
    from tpu_kernels import emulation; emulation.install()  # before the first `import torch`

`TPU_KERNELS_LOG=debug` shows what torch_tpu and XLA say while they start.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from .. import device
from ..errors import EmulationError
from ..log import get_logger
from . import pjrt

__all__ = ["install", "is_active"]

_active = False


def is_active() -> bool:
    """Whether `install` has run in this process.

    Example:
        >>> is_active()  # doctest: +SKIP
        False
    """
    return _active


def install(plugin: str | Path | None = None) -> None:
    """Makes `torch.device("tpu")` an emulated TPU in this process. A second call does nothing.

    Args:
        plugin: The XLA:CPU PJRT plugin to use in place of the one in `pip install 'tpu-kernels[emulation]'`.

    Raises:
        EmulationError: It cannot be done here. The message says why and what to do.

    Example:
        >>> from tpu_kernels import emulation
        >>> emulation.install()  # doctest: +SKIP
        >>> import torch
        >>> torch.ones(3, device="tpu").sum()  # doctest: +SKIP
        tensor(3., device='tpu:0')
    """
    global _active
    if _active:
        return
    _check_process()
    path = _find(plugin)
    device.keep_jax_off_tpu()
    quiet = not get_logger().isEnabledFor(logging.DEBUG)
    # Read once each, while the native libraries load. Put back afterwards, for JAX finds libtpu through the
    # first one: compiling for a real TPU goes on working beside the emulated one.
    # (The other one jax sets when it is imported, so what it holds need not be the user's wish.)
    variables = {"TPU_LIBRARY_PATH": str(path), "TF_CPP_MIN_LOG_LEVEL": "1" if quiet else "0"}
    if quiet:
        warnings.filterwarnings("ignore", message="<TorchTpu/Performance/TcMalloc/>")
    with _environment(variables):
        pjrt.adapt(path)
        # Not before, as this imports torch, which loads torch_tpu, which loads the library just named.
        from . import backend

        backend.load(quiet)
    _active = True


def _check_process() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise EmulationError(
            f"The emulated TPU needs Linux on x86-64; this is {sys.platform} on {platform.machine()}."
        )
    if importlib.util.find_spec("torch_tpu") is None:
        raise EmulationError("The emulated TPU needs torch_tpu: pip install torch-tpu")
    if device.attached_chips():
        raise EmulationError(
            f"This machine has a real TPU ({device.current().describe()}), which an emulated one would hide. "
            "Run the program without the emulation here."
        )
    if "torch_tpu" in sys.modules:
        raise EmulationError(
            "torch is imported already, and with it torch_tpu, which has settled on its library. Call "
            "emulation.install() before the first `import torch`, or run the program with "
            "`tpu-kernels emulate`, or tests with TPU_KERNELS_EMULATE=1."
        )


def _find(plugin: str | Path | None) -> Path:
    if plugin is None:
        try:
            plugin = importlib.import_module("lammps_jax_pjrt_cpu").PLUGIN_PATH
        except ModuleNotFoundError as error:
            raise EmulationError(
                "The emulated TPU needs an XLA:CPU plugin: pip install 'tpu-kernels[emulation]'"
            ) from error
    path = Path(plugin).resolve()
    if not path.is_file():
        raise EmulationError(f"There is no PJRT plugin at {path}.")
    return path


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
