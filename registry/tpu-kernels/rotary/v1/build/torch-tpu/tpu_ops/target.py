"""What an op is lowered for: a TPU generation, real or emulated; and keeping JAX itself off the TPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from typing import Any

_logger = logging.getLogger("tpu_kernels.ops")

# The device kinds that libtpu reports, and jax knows, by generation.
GENERATION_OF_KIND = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
    "TPU v7": "tpu7x",
    "TPU v7x": "tpu7x",
}
KIND_OF_GENERATION = {
    "v4": "TPU v4",
    "v5e": "TPU v5 lite",
    "v5p": "TPU v5",
    "v6e": "TPU v6 lite",
    "tpu7x": "TPU7x",
}
# Tiles are chosen for some generation where the device does not tell one.
DEFAULT_GENERATION = "v6e"


@dataclasses.dataclass(frozen=True)
class Target:
    """A device that programs are made for.

    Attributes:
      generation: v4, v5e, v5p, v6e or tpu7x.
      emulated: torch_tpu runs on an XLA:CPU plugin, which runs no Mosaic programs.
      cores: TensorCores of one device.
    """

    generation: str
    emulated: bool = False
    cores: int = 1

    def mesh(self) -> contextlib.AbstractContextManager[Any]:
        """Makes kernels that ask for the TPU's properties while tracing see this target."""
        import jax

        kind = KIND_OF_GENERATION[self.generation]
        device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=self.cores, platform="tpu")
        return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


@functools.cache
def current_target() -> Target:
    """The target of torch's device `tpu` in this process.

    Example:
      >>> current_target()  # doctest: +SKIP
      Target(generation='v6e', emulated=False, cores=1)
    """
    from torch_tpu._internal.device import _device_ops_backend

    attributes = _device_ops_backend._get_local_device_attributes()
    kind = str(attributes.get("device_kind", ""))
    if kind != "cpu" and kind not in GENERATION_OF_KIND:
        _logger.warning("unknown TPU %r: tiles are chosen as for %s", kind, DEFAULT_GENERATION)
    return Target(
        generation=GENERATION_OF_KIND.get(kind, DEFAULT_GENERATION),
        emulated=kind == "cpu",
        cores=int(attributes.get("num_cores", 1)),
    )


def keep_jax_off_tpu() -> None:
    """Makes JAX use the CPU, unless its platforms were chosen already.

    torch_tpu owns the chip; JAX only traces here. Left alone, JAX would start a TPU client of its own on first
    use and contend for the chip.
    """
    if os.environ.get("JAX_PLATFORMS"):
        return
    import jax

    if jax.config.jax_platforms is None:  # type: ignore[attr-defined]
        # Refused by jax once a backend exists: then the program itself has chosen to run JAX somewhere.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_platforms", "cpu")
