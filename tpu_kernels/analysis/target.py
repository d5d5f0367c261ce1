"""What is compiled for: a TPU generation and a topology of its chips."""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import dataclass
from typing import Any, get_args

from ..device import Generation
from ..errors import AnalysisError

# Slices by their number of chips. Chips form a plane in v5e and v6e, a cube in the others.
_PLANE = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBE = {1: "1x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}


@dataclass(frozen=True)
class _Chip:
    device_kind: str  # as libtpu calls it
    # TensorCores of one JAX device: v5p's two work as one, v4's and TPU7x's are a device each.
    cores_of_device: int
    # What the number in the name of a slice counts a chip as: `v5p-8` has 8 TensorCores, `v5e-8` 8 chips.
    counted_as: int
    slices: dict[int, str]


_CHIPS: dict[Generation, _Chip] = {
    "v4": _Chip("TPU v4", 1, 2, _CUBE),
    "v5e": _Chip("TPU v5 lite", 1, 1, _PLANE),
    "v5p": _Chip("TPU v5", 2, 2, _CUBE),
    "v6e": _Chip("TPU v6 lite", 1, 1, _PLANE),
    "tpu7x": _Chip("TPU7x", 1, 2, _CUBE),
}
_ONE_HOST = 4  # chips; what a generation's name alone means

GENERATIONS: tuple[Generation, ...] = get_args(Generation)


@dataclass(frozen=True)
class CompileTarget:
    """A TPU that programs are compiled for.

    Attributes:
        name: As it was asked for, e.g. `v6e-8`.
        generation: v4, v5e, v5p, v6e or tpu7x.
        topology: libtpu's name of the slice, e.g. `v6e:2x4`.
    """

    name: str
    generation: Generation
    topology: str

    @property
    def devices(self) -> int:
        """How many JAX devices the slice has: chips, or where a TensorCore is a device, these."""
        chips = math.prod(map(int, self.topology.partition(":")[2].split("x")))
        chip = _CHIPS[self.generation]
        return chips * chip.counted_as // chip.cores_of_device

    def mesh(self) -> contextlib.AbstractContextManager[Any]:
        """Makes kernels that ask for the TPU's properties while tracing see this target."""
        import jax

        chip = _CHIPS[self.generation]
        device = jax.sharding.AbstractDevice(
            device_kind=chip.device_kind, num_cores=chip.cores_of_device, platform="tpu"
        )
        return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def parse_target(name: str) -> CompileTarget:
    """Reads the name of a target.

    Args:
        name: A generation (`v6e`: one host's chips), a slice as Google Cloud names it (`v6e-8`, `v5p-16`; the
            number counts chips of v5e and v6e, TensorCores of the others), or libtpu's own name of a topology
            (`v6e:2x4`).

    Raises:
        AnalysisError: There is no such target.

    Example:
        >>> parse_target("v6e-8").topology
        'v6e:2x4'
        >>> parse_target("v5p-8").topology
        'v5p:2x2x1'
    """
    match = re.fullmatch(r"(\w+)(?:-(\d+)|:(\d+(?:x\d+)+))?", name)
    generation = next((g for g in GENERATIONS if match and g == match[1]), None)
    if match is None or generation is None:
        raise AnalysisError(
            f"unknown TPU target {name!r}; give one of {', '.join(GENERATIONS)}, or a slice such as v6e-8 "
            f"or v6e:2x4"
        )
    chip = _CHIPS[generation]
    if match[3]:
        slice_ = match[3]
        if slice_.count("x") != chip.slices[_ONE_HOST].count("x"):
            example = f"{generation}:{chip.slices[_ONE_HOST]}"
            raise AnalysisError(
                f"TPU target {name!r} has a wrong number of axes; it should be like {example}"
            )
    else:
        chips = int(match[2]) / chip.counted_as if match[2] else _ONE_HOST
        if chips not in chip.slices:
            known = ", ".join(f"{generation}-{n * chip.counted_as}" for n in chip.slices)
            raise AnalysisError(
                f"unknown TPU slice {name!r}; give one of {known}, or a topology such as "
                f"{generation}:{chip.slices[_ONE_HOST]}"
            )
        slice_ = chip.slices[int(chips)]
    return CompileTarget(name, generation, f"{generation}:{slice_}")
