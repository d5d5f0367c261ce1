"""Every shipped kernel compiles for every generation that it claims."""

from __future__ import annotations

import pytest

from benchmarks.compile_matrix import WORKLOADS, cells, compile_cells, shipped_kernels

from .analysis.conftest import needs_libtpu

pytestmark = needs_libtpu


def check(workloads: tuple[str, ...]) -> None:
    results = compile_cells(cells(shipped_kernels(), workloads))
    assert results
    failed = [f"{cell.row} for {cell.generation}: {r.failure.summary}" for cell, r in results if r.failure]
    assert not failed, "\n".join(failed)


def test_a_part_of_the_matrix_compiles() -> None:
    check(("qwen3-30b-a3b:decode:8",))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_matrix_compiles() -> None:
    check(WORKLOADS)
