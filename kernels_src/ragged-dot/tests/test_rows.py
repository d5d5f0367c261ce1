"""How a product's time, simulated, grows with its rows: no number of rows is much worse than the next."""

from __future__ import annotations

import functools
import importlib.util
import itertools

import jax
import numpy as np
import pytest
from ragged_dot import functions

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="NOT RUN: libtpu is not installed"),
    pytest.mark.skipif(
        importlib.util.find_spec("pydantic") is None,
        reason="NOT RUN: tpu-kernels, with the simulator, is not installed",
    ),
    pytest.mark.timeout(1800),
]

GROUPS, K, N = 8, 2048, 1536  # Qwen3-30B-A3B's gate and up, of which one of 16 chips has these groups
GROWTH = 1.25
# On both sides of each power of two, where the cut of a product changes.
GRID = [*sorted(rows + more for rows in (32, 64, 128, 256, 512) for more in (0, 1)), 1024]
# The group of each row: the first 32 rows have all groups already, so the weights are the same for all numbers of rows.
DRAWN = np.random.default_rng(0).integers(0, GROUPS, 1024)
IN_TURN = np.arange(1024) % GROUPS


@pytest.mark.slow
@pytest.mark.parametrize("group", [DRAWN, IN_TURN], ids=["drawn", "in turn"])
@pytest.mark.parametrize("tpu", ["v5e", "v5p", "v6e", "tpu7x"])
def test_time_grows_with_rows_without_a_cliff(tpu, group):
    _walk(tpu, GRID, group)


def test_time_does_not_jump_where_rows_leave_a_tile():
    _walk("v6e", [64, 65], IN_TURN)


def _walk(tpu: str, grid: list[int], group: np.ndarray) -> None:
    times = {rows: _simulated(group[:rows], tpu) for rows in grid}
    growth = {after: times[after] / times[before] for before, after in itertools.pairwise(grid)}
    assert max(growth.values()) <= GROWTH, f"{times}, in ms"


def _simulated(group: np.ndarray, tpu: str) -> float:
    """Milliseconds of the kernel and, estimated, of XLA's ops."""
    sizes = np.bincount(group, minlength=GROUPS).astype(np.int32)
    product = functools.partial(functions.ragged_dot, transpose_rhs=True, tpu=tpu)
    arrays = [
        jax.ShapeDtypeStruct(*array)
        for array in (((len(group), K), "bfloat16"), ((GROUPS, N, K), "bfloat16"), ((GROUPS,), "int32"))
    ]
    from tpu_kernels import analysis

    profile = analysis.simulate(product, *arrays, tpu=tpu, data={"group_sizes": sizes})
    return profile.time_ms + profile.xla_ms
