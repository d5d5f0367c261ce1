"""The comparison with other libraries: what is compared, and how it is told."""

from __future__ import annotations

import io

from rich.console import Console

from benchmarks.bench_simulated import (
    ATTENTION,
    GROUPED,
    OURS,
    Contender,
    Row,
    contenders,
    describe,
    merged,
    problems,
    simulated,
    table,
)
from benchmarks.calibration.records import load_records

RECORDS = load_records()


def test_a_problem_has_the_fastest_record_of_each_family() -> None:
    [first, *_] = problems(RECORDS, "v6e", GROUPED)
    assert [record.family for record in first] == list(GROUPED)
    same = [record for record in RECORDS if (record.generation, record.shape) == ("v6e", first[0].shape)]
    for record in first:
        assert record.median_ms == min(r.median_ms for r in same if r.family == record.family)
    assert describe(first[0]).startswith("M131072 K2048 N768 G128")
    assert [each.kernel for each in contenders(first)] == [
        OURS,
        *(f"tokamax, {family}" for family in GROUPED),
        "jax, megablox",
    ]


def test_attention_is_compared_without_ours() -> None:
    [first, *_] = problems(RECORDS, "tpu7x", (ATTENTION,))
    assert [each.kernel for each in contenders(first)] == [f"tokamax, {ATTENTION}", "jax, splash attention"]
    assert problems(RECORDS, "v6e", (ATTENTION,)) == []


def test_what_is_not_installed_is_not_run() -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'tokamax'", name="tokamax")

    record = problems(RECORDS, "v6e", GROUPED)[0][0]
    row = simulated(Contender(record, "tokamax", missing, 1.5))  # type: ignore[arg-type]
    assert (row.simulated_ms, row.recorded_ms) == (None, 1.5)
    assert row.note == "not run: tokamax is not installed"


def test_rows_of_another_environment_take_the_place_of_what_was_not_run() -> None:
    ours = Row("v6e", "a problem", OURS, 1.0, None, "jax 1")
    here = Row("v6e", "a problem", "tokamax", None, 1.4, "not run: tokamax is not installed")
    there = Row("v6e", "a problem", "tokamax", 1.25, 1.4, "jax 2")
    not_there = Row("v6e", "a problem", OURS, None, None, "not run: torch is not installed")
    rows = merged([ours, here], [there, not_there])
    assert rows == [ours, there]
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(table(rows))
    text = captured.get()
    assert "nothing was run on a TPU here" in text
    assert "1.25x" in text
