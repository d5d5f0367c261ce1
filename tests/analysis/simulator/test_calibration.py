from __future__ import annotations

import pytest

from benchmarks.calibration.command import COUNTS, chosen
from benchmarks.calibration.records import load_records
from tpu_kernels.analysis.simulator.calibration import calibrated, load_calibration
from tpu_kernels.errors import SimulationError


@pytest.mark.parametrize("generation", calibrated())
def test_constants_are_within_what_the_machine_allows(generation: str) -> None:
    calibration = load_calibration(generation)
    memory, matrix = calibration.memory, calibration.matrix
    assert 0.7 < memory.attainable_gbps / memory.nominal_gbps < 1
    # At the clock of the records, the units do no more than the published peak.
    assert matrix.multiply_cycles > 0
    assert calibration.libtpu
    assert calibration.accuracy


def test_accuracy_is_what_is_promised() -> None:
    """Of the shipped constants, on records that had no part in the fit."""
    promised = {"v5e": 0.03, "v6e": 0.04, "v5p": 0.05, "tpu7x": 0.05}
    for generation, most in promised.items():
        parts = load_calibration(generation).accuracy
        matmuls = [part for part in parts if part.kernels.startswith("grouped matmul")]
        total = sum(part.records for part in matmuls)
        assert total >= 6
        mean = sum(part.mean_error * part.records for part in matmuls) / total
        assert mean <= most
        assert all(part.mean_error < part.roofline_error for part in parts)
    [splash] = [part for part in load_calibration("tpu7x").accuracy if part.kernels == "splash attention"]
    assert splash.mean_error <= 0.10


def test_a_generation_without_records_is_not_calibrated() -> None:
    with pytest.raises(SimulationError, match="not calibrated for v4"):
        load_calibration("v4")


def test_no_problem_is_in_both_halves() -> None:
    records = load_records()
    fitted = {record.shape for record in records if record.fitted}
    held = {record.shape for record in records if not record.fitted}
    assert fitted
    assert held
    assert not fitted & held


def test_the_choice_of_records_is_their_own() -> None:
    records = chosen()
    assert len(records) == sum(COUNTS.values())
    assert [record.key for record in records] == [record.key for record in chosen()]
    assert len({record.key for record in records}) == len(records)
