"""What is known of each generation: facts of the machine, and constants fitted on recorded times."""

from __future__ import annotations

import functools
from importlib import resources

from pydantic import BaseModel, ConfigDict

from ...errors import SimulationError


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Matrix(_Record):
    """A generation's matrix units.

    Attributes:
        side: Rows and columns of a unit.
        multiply_cycles: That a unit is busy with the rows of one multiply.
        push_cycles: That it is busy with a push of weights.
        latch_cycles: That it is busy with taking over new weights.
        queue: Multiplies that wait for a unit before the core waits.
        latency: Cycles from a multiply's begin to its result.
        results: Pops that take the result of one multiply, of units whose results come in order.
    """

    side: int
    multiply_cycles: float
    push_cycles: float = 0.0
    latch_cycles: float = 0.0
    queue: int
    latency: float
    results: int


class Memory(_Record):
    """The way between HBM and the core.

    Attributes:
        nominal_gbps: HBM bandwidth of the chip's one device, as published, in GB/s.
        attainable_gbps: What is reached.
        latency_ns: From a DMA's last byte to its being seen as done.
        start_ns: That the channel is taken up by each DMA beside its bytes.
        local_ns: What a DMA within the core takes.
        granule_bytes: What DMAs and semaphores count in.
    """

    nominal_gbps: float
    attainable_gbps: float
    latency_ns: float
    start_ns: float = 0.0
    local_ns: float
    granule_bytes: int


class Accuracy(_Record):
    """How far simulated times are from recorded ones that had no part in the fit.

    Attributes:
        kernels: Which kernels.
        records: How many.
        mean_error: Mean of the errors' absolute values, as a fraction.
        largest_error: The largest.
        roofline_error: The mean one of the plain roofline, for comparison.
    """

    kernels: str
    records: int
    mean_error: float
    largest_error: float
    roofline_error: float


class Calibration(_Record):
    """A generation, as the simulator sees it.

    Attributes:
        generation: v5e, v5p, v6e or tpu7x.
        clock_ghz: Of the core.
        peak_tflops: Of the matrix units in bf16, as published, of one device.
        cores: Of one device, that a kernel may be divided between.
        delay_slots: Bundles that are run after a branch; None: the program tells.
        matrix, memory: Its parts.
        op_us: What is taken for the start of an op of XLA's; an assumption.
        libtpu: The compiler whose schedules the fit was made on.
        accuracy: On records set aside, by family of kernels.
        provenance: Where the constants come from.
    """

    generation: str
    clock_ghz: float
    peak_tflops: float
    cores: int = 1
    delay_slots: int | None
    matrix: Matrix
    memory: Memory
    op_us: float
    libtpu: str
    accuracy: tuple[Accuracy, ...]
    provenance: str

    @property
    def bytes_per_cycle(self) -> float:
        """Attainable, from and to HBM."""
        return self.memory.attainable_gbps / self.clock_ghz

    @property
    def mean_error(self) -> float | None:
        """On all records set aside; None where there are none."""
        records = sum(part.records for part in self.accuracy)
        weighted = sum(part.mean_error * part.records for part in self.accuracy)
        return weighted / records if records else None


@functools.cache
def load_calibration(generation: str) -> Calibration:
    """The calibration of a generation.

    Raises:
        SimulationError: There is none, as no recorded times exist to fit it on.
    """
    path = resources.files(__package__).joinpath("calibrations", f"{generation}.json")
    if not path.is_file():
        known = ", ".join(sorted(calibrated()))
        raise SimulationError(f"the simulator is not calibrated for {generation}, only for {known}")
    return Calibration.model_validate_json(path.read_text())


def calibrated() -> list[str]:
    """The generations that can be simulated."""
    folder = resources.files(__package__).joinpath("calibrations")
    return sorted(
        entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")
    )
