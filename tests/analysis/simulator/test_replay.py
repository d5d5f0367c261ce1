from __future__ import annotations

import pytest

from tpu_kernels.analysis.simulator.blocks import find_blocks
from tpu_kernels.analysis.simulator.calibration import Calibration, Matrix, load_calibration
from tpu_kernels.analysis.simulator.executor import run
from tpu_kernels.analysis.simulator.models import FifoDma, QueuedMatrix
from tpu_kernels.analysis.simulator.parser import parse_bundles
from tpu_kernels.analysis.simulator.replay import Timing, replay
from tpu_kernels.errors import SimulationError

from .bundles import PREAMBLE, scalar

HBM = "%s1_s0 = inlined_call_operand.hbm [shape: f32[1024,1024], index: 0, kind: input, shape index: {}]"
MATRIX = Matrix(side=128, multiply_cycles=8, queue=2, latency=100, results=2)


@pytest.fixture
def calibration() -> Calibration:
    """A cycle a nanosecond, 32 bytes a cycle."""
    v6e = load_calibration("v6e")
    memory = v6e.memory.model_copy(
        update={"attainable_gbps": 32.0, "latency_ns": 100.0, "start_ns": 0.0, "local_ns": 50.0}
    )
    return v6e.model_copy(update={"clock_ghz": 1.0, "memory": memory})


def times(calibration: Calibration, *instructions: str) -> Timing:
    schedule = parse_bundles(PREAMBLE + scalar(HBM, *instructions))
    blocks = find_blocks(schedule, 4)
    trace = run(schedule, blocks, {}, granule=32, names=["x"])
    models = {"dma": FifoDma(calibration), "matrix": QueuedMatrix(MATRIX)}
    return replay(schedule, blocks, trace, granule=32, **models)


def fetch(granules: int, semaphore: int) -> str:
    return f"%2 = dma.hbm_to_vmem %s1_s0, {granules}, [#allocation1], [#allocation{semaphore}]"


def wait(granules: int, semaphore: int) -> str:
    return f"%3 = dma.done.wait [#allocation{semaphore}], {granules}"


def test_a_dma_takes_its_bytes_and_the_latency(calibration: Calibration) -> None:
    timing = times(calibration, fetch(1000, 2), wait(1000, 2))
    # It starts in cycle 1; the core comes to the wait in cycle 2.
    assert timing.stall_cycles == 1 + 1000 + 100 - 2
    assert timing.cycles == timing.issue_cycles + timing.stall_cycles
    [transfer] = timing.transfers
    assert (transfer.size, transfer.operand, transfer.write) == (32_000, 0, False)


def test_dmas_take_turns(calibration: Calibration) -> None:
    timing = times(calibration, fetch(1000, 2), fetch(500, 3), wait(500, 3), wait(1000, 2))
    assert [transfer.done for transfer in timing.transfers] == [1101.0, 1601.0]
    # When the second is there, so is the first.
    assert len(timing.stalls) == 1


def test_work_meanwhile_is_not_waited_for(calibration: Calibration) -> None:
    hidden = times(calibration, fetch(10, 2), *["%v1_v1 = vadd.f32 %v1_v1, %v1_v1"] * 200, wait(10, 2))
    assert hidden.stall_cycles == 0


def test_waiting_does_not_take_from_a_semaphore(calibration: Calibration) -> None:
    timing = times(
        calibration, fetch(8, 2), wait(8, 2), wait(8, 2), "%4 = vsyncadd [#allocation2], 4294967288"
    )
    assert len(timing.stalls) == 1


@pytest.mark.parametrize(
    "taken", ["%4 = vsyncadd [#allocation2], 4294967288", "%4 = vsyncpa [#allocation2], 0"]
)
def test_a_wait_for_what_never_comes_is_a_deadlock(calibration: Calibration, taken: str) -> None:
    with pytest.raises(SimulationError, match=r"deadlock: the kernel waits for 8 .* holds 0.* in line 9"):
        times(calibration, fetch(8, 2), wait(8, 2), taken, wait(8, 2))


def test_the_core_waits_when_a_units_queue_is_full(calibration: Calibration) -> None:
    multiply = "%5 = vmatmul.bf16.gmra.mxu0 %v1_v1"
    few, many = (times(calibration, *[multiply] * count).matrix_cycles for count in (3, 40))
    assert few == 0
    # A multiply is issued each cycle, but for the three that the unit works on or has waiting.
    assert many == pytest.approx(37 * MATRIX.multiply_cycles - 40, abs=MATRIX.multiply_cycles)
    halved = times(calibration, *["%5 = vmatmul.f32.gmra.mxu0 %v1_v1"] * 40).matrix_cycles
    assert halved < many / 2


def test_a_pop_waits_for_its_result(calibration: Calibration) -> None:
    timing = times(calibration, "%5 = vmatmul.bf16.gmra.mxu0 %v1_v1", "%v6_v6 = vpop.f32.mxu0")
    assert timing.matrix_cycles == MATRIX.latency - 1
