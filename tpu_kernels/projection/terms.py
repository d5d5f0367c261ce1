"""What is stated and not simulated: exchange between chips, memory of a chip, and the host's part of a step."""

from __future__ import annotations

import functools
import math
from importlib import resources

from pydantic import BaseModel, ConfigDict

from ..errors import ProjectionError
from .records import Collective
from .times import Bounds


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Interconnect(_Record):
    """Between chips: GB/s of a port, one way, by generation; and what a hop takes."""

    source: str
    port_gbps: dict[str, float]
    hop_us: float


class Hbm(_Record):
    """Of a device, by generation, and the share that a program can use."""

    source: str
    gib: dict[str, float]
    usable: float


class Host(_Record):
    """The host's part of a step: transformers' generate where its step is compiled, where it runs op by op, and a loop
    that stays on the device."""

    source: str
    compiled_us_per_layer: float
    op_by_op_us_per_layer: float
    device_loop_us: float


class Terms(_Record):
    """All that is stated, with where it comes from."""

    interconnect: Interconnect
    hbm: Hbm
    host: Host


@functools.cache
def load_terms() -> Terms:
    """The terms that this release states."""
    path = resources.files(__package__).joinpath("terms.json")
    return Terms.model_validate_json(path.read_text(encoding="utf-8"))


def collective_bounds(collective: Collective, batch: int, generation: str) -> Bounds:
    """What an exchange of bf16 rows takes, over a ring in both directions.

    At least: its bytes at full speed and half a round. At most: in one direction only, a hop for each step of the ring.

    Example:
        >>> reduce = Collective(kind="all-reduce", module="mlp.experts", chips=8, width=2048)
        >>> collective_bounds(reduce, 64, "v6e")
        Bounds(low=6.293760000000001, high=18.58752)
    """
    terms = load_terms().interconnect
    if generation not in terms.port_gbps:
        raise ProjectionError(
            f"no interconnect is stated for {generation}; there are {', '.join(terms.port_gbps)}"
        )
    passes = 2 if collective.kind == "all-reduce" else 1
    chips = collective.chips
    moved = passes * (chips - 1) / chips * batch * collective.width * 2
    one_way_us = moved / terms.port_gbps[generation] / 1e3
    hops = terms.hop_us * passes
    return Bounds(
        one_way_us / 2 + hops * math.ceil(chips / 2) / passes,
        one_way_us + hops * (chips - 1),
    )


def usable_hbm(generation: str) -> int:
    """Bytes of a device's HBM that a program can use."""
    terms = load_terms().hbm
    return round(terms.gib[generation] * terms.usable * 2**30)
