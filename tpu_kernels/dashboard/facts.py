"""What a dashboard knows: plain records, written beside the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

Status = Literal["passed", "failed", "not run"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Run(_Record):
    """An op of a kernel in a case, on one TPU generation.

    Attributes:
        generation: v4, v5e, v5p, v6e or tpu7x.
        op, case: What was called, in which layer of a model.
        compiled: Whether the TPU compiler takes it.
        reason: Why it does not compile, or why there is no time.
        vmem_bytes: Vector memory that it takes.
        time_ms: Of its kernels, simulated; None where that was not done.
        error: Mean error of simulated times on this generation, as a fraction.
        floor_ms: The larger of bytes at attainable bandwidth and flops at the published peak.
        evidence: How the time came about.
    """

    generation: str
    op: str
    case: str
    compiled: bool
    reason: str = ""
    vmem_bytes: int | None = None
    time_ms: float | None = None
    error: float | None = None
    floor_ms: float | None = None
    evidence: Literal["simulated", "compiled"] = "compiled"

    @property
    def over_floor(self) -> float | None:
        """The time in multiples of the floor."""
        return self.time_ms / self.floor_ms if self.time_ms and self.floor_ms else None


class KernelFacts(_Record):
    """A version of a kernel.

    Attributes:
        name: org/name.
        version: Its number.
        build: The id of what was built, which is of its content.
        generations: That it claims.
        runs: In cases of real models.
        checks: What `tpu-kernels check` came to, by check; empty where it was not made.
    """

    name: str
    version: int
    build: str
    generations: tuple[str, ...]
    runs: tuple[Run, ...] = ()
    checks: dict[str, Status] = {}

    def of(self, generation: str) -> list[Run]:
        """The runs on a generation."""
        return [run for run in self.runs if run.generation == generation]


class ModelFacts(_Record):
    """A model decoding by one implementation, as `tpu-kernels bench decode` reports it.

    Attributes:
        model: A Hub id, or a preset.
        arm: The experts' implementation.
        batch: Sequences.
        tokens: Whether they are those of the arm that is compared with.
        graphs: Compiled ones; None where it did not run.
        recompile_limit_hit: torch gave up compiling.
        tokens_per_s: Median.
        evidence: `measured` on a TPU; `emulated` and `cpu` are no TPU speeds.
        device: Where, in words.
        note: Why it was not run.
        about: The model's class, size, dtype and attention, in words.
        runs_as: What really computes the experts, and which loop decodes, in words.
    """

    model: str
    arm: str
    batch: int
    tokens: Literal["reference", "same", "differ", "not run"]
    graphs: int | None = None
    recompile_limit_hit: bool = False
    tokens_per_s: float | None = None
    evidence: Literal["measured", "emulated", "cpu"]
    device: str = ""
    note: str = ""
    about: str = ""
    runs_as: str = ""


class PeerFacts(_Record):
    """A problem that a kernel of ours and others' solve.

    Attributes:
        kernel, generation, problem: What is compared.
        ours_ms, floor_ms: Simulated, and what the machine allows.
        peer_ms: The best of the others; None where none is known.
        peer_evidence: How that time came about.
    """

    kernel: str
    generation: str
    problem: str
    ours_ms: float
    floor_ms: float | None = None
    peer_ms: float | None = None
    peer_evidence: Literal["measured", "simulated"] = "measured"

    @property
    def faster(self) -> float | None:
        """The factor by which ours is."""
        return self.peer_ms / self.ours_ms if self.peer_ms else None


class Facts(_Record):
    """All that a page shows.

    Attributes:
        made: When, in UTC.
        versions: Of this package, jax, libtpu, torch: what the facts were made with.
        kernels, models, peers: What they are about.
        history: Facts about kernels from before, oldest first.
    """

    made: str
    versions: dict[str, str]
    kernels: tuple[KernelFacts, ...] = ()
    models: tuple[ModelFacts, ...] = ()
    peers: tuple[PeerFacts, ...] = ()
    history: tuple[KernelFacts, ...] = ()

    def trend(self, kernel: KernelFacts, run: Run) -> list[float]:
        """Times of the same call in earlier builds of a kernel, oldest first, and now."""
        before = [
            old.time_ms
            for facts in self.history
            if facts.name == kernel.name and facts.build != kernel.build
            for old in facts.runs
            if (old.generation, old.op, old.case) == (run.generation, run.op, run.case) and old.time_ms
        ]
        return [*before, *([run.time_ms] if run.time_ms else [])]

    def after(self, earlier: Sequence[Facts]) -> Facts:
        """These facts with the kernels of earlier ones as history, a build once."""
        seen: dict[tuple[str, str], KernelFacts] = {}
        for facts in sorted(earlier, key=lambda facts: facts.made):
            for kernel in (*facts.history, *facts.kernels):
                seen.setdefault((kernel.name, kernel.build), kernel)
        return self.model_copy(update={"history": tuple(seen.values())})
