"""Tiles: how a problem is cut into blocks, and which cut is chosen.

`choose` takes a tuned one from `tuned/<generation>.json`, which `tpu-kernels tune` writes, else the first that is
offered.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .tpu_ops import tables


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The block that one step of the grid computes; `depth` is of the contraction, where there is one."""

    rows: int
    columns: int
    depth: int = 0


@dataclasses.dataclass(frozen=True)
class Problem:
    """What `tpu_ops.tables` chooses for: a kernel, `kernel(*arrays, tiles=...)`, on arrays of these shapes."""

    kernel: Callable[..., Any]
    arrays: tuple[tuple[str, tuple[int, ...], str], ...]
    sizes: tuple[tuple[str, int], ...]
    offered: tuple[Tiles, ...]

    @property
    def operation(self) -> str:
        return self.kernel.__name__.strip("_")

    @property
    def dimensions(self) -> Mapping[str, int]:
        return dict(self.sizes)

    @property
    def variant(self) -> Mapping[str, Any]:
        return {"dtype": self.arrays[0][2]}

    def candidates(self, tpu: str) -> Sequence[Tiles]:
        return self.offered

    def fitting(self, values: Mapping[str, Any], tpu: str) -> Tiles | None:
        return next((tiles for tiles in self.offered if dataclasses.asdict(tiles) == dict(values)), None)

    def program(self, config: Tiles) -> tuple[Any, Mapping[str, Any]]:
        shapes = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in self.arrays}
        return functools.partial(self.kernel, tiles=config), shapes


def choose(
    kernel: Callable[..., Any],
    arrays: Mapping[str, jax.Array],
    sizes: Mapping[str, int],
    offered: Sequence[Tiles],
    tpu: str,
) -> Tiles:
    """The tiles for a call of `kernel` on a generation, out of those that are offered, likeliest best first."""
    shapes = tuple((name, tuple(array.shape), str(array.dtype)) for name, array in arrays.items())
    tiles: Tiles = tables.choose(Problem(kernel, shapes, tuple(sizes.items()), tuple(offered)), tpu)
    return tiles
