"""Which tuned config a problem is solved with."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_kernels.ops import tables


@dataclasses.dataclass(frozen=True)
class Blocks:
    rows: int


@dataclasses.dataclass(frozen=True)
class Copy:
    """A problem whose rows must be cut evenly."""

    m: int
    n: int
    dtype: str = "bfloat16"
    operation = "copy"

    @property
    def dimensions(self) -> dict[str, int]:
        return {"m": self.m, "n": self.n}

    @property
    def variant(self) -> dict[str, Any]:
        return {"dtype": self.dtype}

    def candidates(self, tpu: str) -> list[Blocks]:
        return [Blocks(self.m), Blocks(1)]

    def fitting(self, values: Mapping[str, Any], tpu: str) -> Blocks | None:
        return Blocks(values["rows"]) if self.m % values["rows"] == 0 else None

    def program(self, config: Blocks) -> tuple[Any, dict[str, Any]]:
        raise NotImplementedError


def entry(m: int, n: int, rows: int, **others: Any) -> dict[str, Any]:
    same = {"operation": "copy", "variant": {"dtype": "bfloat16"}}
    return {**same, "dimensions": {"m": m, "n": n}, "config": {"rows": rows}, **others}


Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes the user's table."""
    monkeypatch.setenv("TPU_KERNELS_CACHE", str(tmp_path))

    def to(*entries: dict[str, Any], text: str | None = None) -> None:
        path = tables.user_file(tables.package_of(Copy(1, 1)), "v6e")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text or json.dumps(entries))
        forget()

    forget()
    yield to
    forget()


def forget() -> None:
    tables.entries.cache_clear()
    tables._choice.cache_clear()


sizes = st.integers(1, 1 << 20)


@given(st.lists(st.tuples(sizes, sizes, st.integers(1, 64)), max_size=8), sizes, sizes)
def test_the_nearest_entry_within_reach_that_fits_is_chosen(
    table: list[tuple[int, int, int]], m: int, n: int
) -> None:
    problem = Copy(m, n)
    found = tables.nearest([entry(*each) for each in table], problem)

    def way(m_of: int, n_of: int) -> tuple[float, float]:
        return abs(math.log2(m_of / m)), abs(math.log2(n_of / n))

    ways = [way(*each["dimensions"].values()) for each in found]
    assert ways == sorted(ways, key=sum)
    assert len(found) == sum(max(way(*each[:2])) <= tables.REACH for each in table)
    configs = [problem.fitting(each["config"], "v6e") for each in found]
    assert all(config is None or m % config.rows == 0 for config in configs)


def test_choice(write: Write) -> None:
    assert tables.choose(Copy(64, 8), "v6e") == Blocks(64)
    write(entry(64, 8, 16), entry(90, 8, 9), entry(64, 8, 2, operation="move"))
    assert tables.choose(Copy(64, 8), "v6e") == Blocks(16)
    assert tables.choose(Copy(72, 9), "v6e") == Blocks(9), "16 does not fit"
    assert tables.choose(Copy(64, 16), "v6e") == Blocks(64), "too far"
    assert tables.choose(Copy(64, 8), "v5e") == Blocks(64), "another generation"
    assert tables.choose(Copy(64, 8, "float32"), "v6e") == Blocks(64), "another dtype"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "3",
        '[{"operation": "copy"}]',
        '[{"operation": "copy", "variant": {}, "dimensions": {"m": 0}, "config": {}}]',
        '[{"operation": "copy", "variant": {}, "dimensions": {"m": 8}, "config": 4}]',
    ],
)
def test_a_table_that_is_none_is_a_warning(write: Write, text: str, caplog: pytest.LogCaptureFixture) -> None:
    write(text=text)
    assert tables.choose(Copy(64, 8), "v6e") == Blocks(64)
    assert tables.choose(Copy(32, 8), "v6e") == Blocks(32)
    [record] = caplog.records
    assert "v6e.json are not used" in record.getMessage()


def test_problems_are_recorded_once_each() -> None:
    with tables.recording() as problems:
        for m in (8, 16, 8):
            tables.choose(Copy(m, 8), "v6e")
    tables.choose(Copy(32, 8), "v6e")
    assert problems == [Copy(8, 8), Copy(16, 8)]
