"""Our grouped matmul on recorded problems: which are taken, and how they are told."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from benchmarks.bench_ragged_dot import Row, faster, recorded, simulated, spread, table
from benchmarks.calibration.records import load_records
from tests.analysis.conftest import needs_libtpu

RECORDS = load_records()


def test_problems_have_the_best_recorded_time_of_any_peer() -> None:
    problems = recorded(RECORDS, "v6e", None)
    assert {problem.kind for problem in problems} == {"forward", "weight gradient"}
    [first] = [
        p for p in problems if p.name == "M131072 K2048 N768 G128 (128 active)" and p.kind == "forward"
    ]
    assert first.peer_ms == pytest.approx(0.883, abs=1e-3)  # the second of tokamax's two versions
    assert all(problem.floor_ms and problem.peer_ms for problem in problems)


def test_problems_are_spread_over_their_sizes() -> None:
    assert spread(range(9), 3) == [0, 4, 8]
    assert spread(range(9), 1) == [0]
    assert spread(range(2), 3) == [0, 1]


def test_table_counts_what_is_slower() -> None:
    rows = [
        Row("v6e", "forward", "one", 1.0, 1.25, 0.02, 2.5),
        Row("v6e", "forward", "other", 1.0, 2.0, 0.02, 1.0),
        Row("v6e", "decode", "without a record", 1.0, 1.5, 0.02, None),
        Row("v6e", "forward", "fails", 1.0, None, None, 3.0, "not run: it does not compile"),
    ]
    mean = faster(rows)
    assert mean is not None
    assert math.isclose(mean, 1.0)
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(table("v6e", rows))
    text = captured.get()
    assert "ours simulated (mean error 2.0%)" in text
    assert "slower than 1.02x the best peer: 1" in text
    assert "not run: it does not compile" in text


@needs_libtpu
def test_a_weight_gradient_is_simulated() -> None:
    problems = recorded(RECORDS, "v6e", None)
    smallest = next(problem for problem in problems if problem.kind == "weight gradient")
    row = simulated(smallest, "v6e")
    assert not row.note
    assert row.ours_ms is not None
    assert row.ours_ms > row.floor_ms
