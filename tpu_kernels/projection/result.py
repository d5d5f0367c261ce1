"""What a projection says."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from .records import Arm


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Range(_Record):
    """Between which a figure is projected to be."""

    low: float
    high: float


class Row(_Record):
    """One arm at one batch size. Times are of one step, in milliseconds.

    Attributes:
        arm: How experts and attention are computed.
        batch: Sequences, each of which gets a token.
        not_projected: Why there is nothing else; None if there is.
        floor_ms: What the weights and keys that the step needs take at the published HBM bandwidth.
        device_ms: Of the chips: from all work hidden behind other to none; with expected routing.
        worst_ms: At most, if every token went to the busiest chip's experts.
        host_ms: Of the host, which the chips wait for: in a loop on the device, and in transformers' generate.
        step_ms: From device and device loop to the worst routing and generate.
        tokens_per_s: Of all sequences, likewise.
        hbm_bytes: Of a chip: weights, a full cache, and what the largest program holds.
        fits: Into a chip.
        where: What keeps the core busy, by part of the model (`head`: and the embedding; `moves`: copies that belong to
            none); and `exchange` between chips.
        findings: What to fix.
    """

    arm: Arm
    batch: int
    not_projected: str | None = None
    floor_ms: float = 0.0
    device_ms: Range = Range(low=0, high=0)
    worst_ms: float = 0.0
    host_ms: Range = Range(low=0, high=0)
    step_ms: Range = Range(low=0, high=0)
    tokens_per_s: Range = Range(low=0, high=0)
    hbm_bytes: int = 0
    fits: bool = True
    where: dict[str, float] = {}
    findings: tuple[str, ...] = ()


class Ratio(_Record):
    """How many times as many tokens a second our kernels give as the published one: on the device, the host's part
    left out; and with the host's part, the same for both."""

    batch: int
    device: Range
    with_generate: Range


class Comparison(_Record):
    """A published step, measured by others, against its projection with generate.

    Attributes:
        arm: As it is called here.
        deviation: Of the middle of the projection, as a fraction.
    """

    arm: str
    batch: int
    published_ms: float
    projected_ms: float
    deviation: float
    fitted: bool


class Projection(_Record):
    """A model's decode step on a TPU, projected. Nothing was run.

    Attributes:
        model: As it was asked for, and its class.
        parameters: Of the whole model.
        tpu, generation, parallel, context: What for.
        transformers: How transformers is asked for the plan; None where it cannot be.
        usable_hbm_bytes: Of a chip.
        rows: The arms.
        ratios: Ours to the published kernel.
        comparisons: With published steps of this model; empty where there are none.
        published: What these are.
        terms: What is stated and not simulated, with its source.
        error: Mean error of simulated kernel times on this generation; None where there are no records.
        versions: Of the packages that a projection depends on.
        evidence: How the figures came about.
    """

    model: str
    kind: str
    parameters: int
    tpu: str
    generation: str
    parallel: str
    context: int
    transformers: str | None
    usable_hbm_bytes: int
    rows: tuple[Row, ...]
    ratios: tuple[Ratio, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    published: str = ""
    terms: tuple[str, ...] = ()
    error: float | None = None
    versions: dict[str, str | None] = {}
    evidence: str = "projected"
