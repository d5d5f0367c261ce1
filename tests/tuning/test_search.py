"""The search over a real kernel's candidates, and what becomes of it."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tpu_kernels import authoring, get_local_kernel, tuning
from tpu_kernels.errors import TuningError
from tpu_kernels.tuning import Task, Trial, Tuned

from ..analysis.conftest import needs_libtpu

CASE = "qwen3-30b-a3b:decode:1:ep8"


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("what was tried is not tried again")


@needs_libtpu
def test_a_search_is_resumed_and_its_table_travels_in_the_kernel(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Trial] = []
    with tuning.built_source(source) as subject:
        [gate_up, down] = tuning.find_tasks(subject, [CASE], ["v6e"])
        assert gate_up.problem.dimensions == {"m": 8, "k": 2048, "n": 1536, "groups": 16, "sizes": 128}
        assert gate_up.cases == (f"{CASE} gate-up",)
        [first] = tuning.tune(subject, [gate_up], limit=1, workers=1)
        assert first.best == first.heuristic
        assert first.gain == 0.0
        found = tuning.tune(
            subject, [gate_up, down], limit=2, workers=1, on_trial=lambda task, trial: tried.append(trial)
        )
        assert [len(tuned.trials) for tuned in found] == [2, 2]
        assert tried[0] == first.heuristic
        monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", never)
        assert tuning.tune(subject, [gate_up, down], limit=2) == found
        # The second candidate is written, whichever is faster.
        second = dataclasses.replace(found[0], trials=(Trial(None, None, "failed"), found[0].trials[1]))
        tuning.write_table(subject.table("v6e"), [second])
    [build] = [authoring.build(source, source.parent / "out")]
    assert "build/torch-tpu/tuned/v6e.json" in build.files
    with tuning.loaded_kernel(get_local_kernel(source.parent / "out")) as again:
        chosen = again.tables.choose(gate_up.problem, "v6e")
        assert dataclasses.asdict(chosen) == dataclasses.asdict(found[0].trials[1].config)
        # A table changes nothing about what was tried.
        assert tuning.tune(again, [down], limit=2)[0].trials == found[1].trials


def test_training_and_whole_layers_have_their_problems(source: Path) -> None:
    with tuning.built_source(source) as subject:
        training = tuning.find_tasks(subject, ["qwen3-30b-a3b:train:4"], ["v6e"])
        assert [str(task).partition(" ")[0] for task in training] == [
            "forward",
            "forward",
            "weight_gradient",
        ] * 2
        layer = tuning.find_tasks(subject, ["qwen3-30b-a3b:decode:4"], ["v6e", "v5e"], op="experts")
        assert [(task.tpu, task.problem.variant["wide"]) for task in layer] == [
            ("v6e", 2),
            ("v6e", 1),
            ("v5e", 2),
            ("v5e", 1),
        ]
        assert sum(layer[0].job(layer[0].problem.candidates("v6e")[0]).data["group_sizes"]) == 32


def test_a_kernel_that_chooses_nothing_cannot_be_tuned(tmp_path: Path) -> None:
    sample = Path(__file__).parents[1] / "authoring" / "sample-kernel"
    authoring.build(sample, tmp_path / "out")
    with (
        tuning.loaded_kernel(get_local_kernel(tmp_path / "out")) as subject,
        pytest.raises(TuningError, match=r"it chooses no config through tpu_ops\.tables\.choose"),
    ):
        _ = subject.tables
    with pytest.raises(TuningError, match="json is no kernel that was loaded"), tuning.loaded_kernel(json):
        pass


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int


@dataclasses.dataclass(frozen=True)
class Copy:
    m: int
    operation = "copy"
    variant = {"dtype": "bfloat16"}  # noqa: RUF012  as a kernel has it

    @property
    def dimensions(self) -> dict[str, int]:
        return {"m": self.m}


def tuned(m: int, *times: float | None) -> Tuned:
    trials = tuple(
        Trial(Config(rows), time, None if time else "why") for rows, time in enumerate(times, start=1)
    )
    return Tuned(Task(Copy(m), "v6e", {}, (f"case {m}",)), trials, "simulated")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("times", "best", "gain"),
    [
        ((2.0, 3.0, 1.0), 3, 1.0),
        ((2.0, 1.999), 1, 0.0),
        ((None, 3.0), 2, None),
        ((None, None), None, None),
    ],
)
def test_the_best_is_the_fastest_unless_the_kernels_choice_is_as_good(
    times: tuple[float | None, ...], best: int | None, gain: float | None
) -> None:
    found = tuned(8, *times)
    assert (found.best and found.best.config.rows) == best
    assert found.gain == gain


def test_a_table_is_added_to(tmp_path: Path) -> None:
    path = tmp_path / "tuned" / "v6e.json"
    tuning.write_table(path, [tuned(8, 2.0, 1.0), tuned(16, None)])
    tuning.write_table(path, [tuned(32, 3.0), tuned(8, 0.5)])
    table = json.loads(path.read_text())
    assert [(entry["dimensions"]["m"], entry["config"], entry["time_ms"]) for entry in table] == [
        (32, {"rows": 1}, 3.0),
        (8, {"rows": 1}, 0.5),
    ]
    assert table[0]["evidence"] == "simulated"
    assert table[0]["cases"] == ["case 32"]
    assert set(table[0]["versions"]) == {"jax", "libtpu"}
    assert [file.name for file in path.parent.iterdir()] == ["v6e.json"]
    with pytest.raises(TuningError, match="cannot be written"):
        tuning.write_table(path / "below.json", [tuned(8, 1.0)])
