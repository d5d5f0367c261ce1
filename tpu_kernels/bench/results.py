"""What a decode benchmark is asked for and what it found: plain data, without torch."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import BenchmarkError, first_line

DeviceChoice = Literal["auto", "tpu", "emulated", "cpu"]
DtypeChoice = Literal["auto", "float32", "bfloat16"]
Evidence = Literal["measured", "emulated", "cpu"]

STOCK = "stock"
"""The arm in which the model runs as it was loaded, with no experts implementation asked for."""

LOOP = "+loop"
"""What follows the experts implementation in the name of an arm that this library's decode loop runs."""

SCHEMA_VERSION = 2

_CAUTIONS: Mapping[Evidence, str | None] = {
    "measured": None,
    "emulated": "Emulated device on a CPU: these are not TPU speeds. Only tokens and graphs mean anything.",
    "cpu": "Run on a CPU: these are not TPU speeds.",
}


@dataclass(frozen=True)
class DecodeConfig:
    """One decode benchmark: every arm in `experts` at every batch size in `batches`.

    Attributes:
        model: A Hub id, a folder, or ``preset:NAME``.
        experts: The arms: names of experts implementations, or `STOCK`, each perhaps with `LOOP` after it.
        batches: Batch sizes, in sequences.
        prompt_length: Tokens in each sequence's prompt.
        new_tokens: Decode steps, each one token a sequence. Prefill's own token comes on top.
        repeats: Timed runs of each arm and batch size, after one that compiles and is not timed.
        prompt_file: UTF-8 text the prompts are cut from; the built-in text if None.
        device: Where to run; ``auto`` takes a TPU, else the emulated device, else the CPU.
        dtype: Of weights and cache; ``auto`` is the checkpoint's own.
        parallel: The plan over ranks, such as ``ep2``; ``tp1`` is one process. As for `tpu_kernels.distributed_config`.
    """

    model: str
    experts: tuple[str, ...] = ("tpu_fused_experts+loop", "tpu_fused_experts", STOCK)
    batches: tuple[int, ...] = (1, 8, 64)
    prompt_length: int = 128
    new_tokens: int = 64
    repeats: int = 3
    prompt_file: Path | None = None
    device: DeviceChoice = "auto"
    dtype: DtypeChoice = "auto"
    parallel: str = "tp1"

    @property
    def phases(self) -> int:
        """How many runs of the model that takes: a first one and the repeats, for each arm and batch size."""
        return len(self.experts) * len(self.batches) * (1 + self.repeats)


@dataclass(frozen=True)
class Summary:
    """Median and quartiles of a set of samples, in the unit of the field it is in."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Summary:
        """Summarises at least one sample.

        >>> Summary.of([1.0, 2.0, 3.0, 4.0, 5.0])
        Summary(median=3.0, low=2.0, high=4.0)
        """
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class Difference:
    """Where an arm's tokens first leave the reference's: sequence in the batch, position in its output."""

    row: int
    position: int


@dataclass(frozen=True)
class Measurement:
    """What one arm did at one batch size.

    Attributes:
        first_run_s: The first run, in seconds: it compiles (or finds compiled, in torch's cache on disk) and
            warms up. Not in any other figure.
        prefill_ms: From handing over the prompt to its first token on the host.
        step_ms: One decode step: each sequence's next token, on the host. Where a dispatch makes several, the
            dispatch's time over their number.
        host_ms: What of a step the thread that runs Python was busy; one sample a repeat. While it waits for the
            device it is not.
        tokens_per_s: Tokens of all sequences over the time of all decode steps, one sample a repeat.
        graphs: Graphs compiled in the first run. Zero where transformers does not compile (CPU).
        late_graphs: Graphs compiled in the timed runs; their compile time is in the samples.
        recompile_limit_hit: Some code recompiled so often that torch gave up and runs it op by op.
        reference: The arm the tokens are compared with.
        difference: Where they first differ; None if all are equal.
        prefill_samples_ms: One a repeat.
        step_samples_ms: One list a repeat, one number a step.
    """

    first_run_s: float
    prefill_ms: Summary
    step_ms: Summary
    host_ms: Summary
    tokens_per_s: Summary
    graphs: int
    late_graphs: int
    recompile_limit_hit: bool
    reference: str
    difference: Difference | None
    prefill_samples_ms: tuple[float, ...]
    step_samples_ms: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class ArmResult:
    """One arm at one batch size: either what was measured, or why it did not run.

    Attributes:
        experts: The arm's name.
        runs_as: What really computes it, in words.
        batch: In sequences.
        measurement: None if it did not run.
        not_run: The reason, None if it ran.
    """

    experts: str
    runs_as: str
    batch: int
    measurement: Measurement | None
    not_run: str | None


@dataclass(frozen=True)
class DecodeResult:
    """A benchmark's outcome, with what it takes to judge it.

    Attributes:
        config: What was asked for.
        evidence: How the figures came about. Only ``measured`` ones are speeds of a TPU.
        device: The device, in words.
        model: The model's class, parameters, dtype and attention, in words.
        versions: Of Python and the packages involved; None for those not installed.
        started: UTC, ISO 8601.
        arms: In the order they ran.
    """

    config: DecodeConfig
    evidence: Evidence
    device: str
    model: str
    versions: Mapping[str, str | None]
    started: str
    arms: tuple[ArmResult, ...]

    @property
    def caution(self) -> str | None:
        """What must be said wherever these figures are shown; None if they are a TPU's."""
        return _CAUTIONS[self.evidence]

    def to_json(self) -> str:
        """The whole result as JSON, raw samples included."""
        document: dict[str, Any] = {
            "schema": SCHEMA_VERSION,
            "benchmark": "decode",
            "evidence": self.evidence,
            "caution": self.caution,
            **dataclasses.asdict(self),
        }
        return json.dumps(document, indent=2, default=str) + "\n"

    @classmethod
    def from_json(cls, text: str) -> DecodeResult:
        """Reads what `to_json` wrote.

        Raises:
            BenchmarkError: It is no such document, or one of another release.
        """
        from pydantic import TypeAdapter, ValidationError

        try:
            document = json.loads(text)
            if document.get("schema") != SCHEMA_VERSION:
                raise BenchmarkError(
                    f"the benchmark's schema is {document.get('schema')}, but this release reads {SCHEMA_VERSION}; "
                    "run it again"
                )
            fields = {field.name: document[field.name] for field in dataclasses.fields(cls)}
            return TypeAdapter(cls).validate_python(fields)
        except (json.JSONDecodeError, AttributeError, KeyError, ValidationError) as error:
            raise BenchmarkError(f"this is no result of bench decode: {first_line(error)}") from error


def split_arm(arm: str) -> tuple[str, bool]:
    """The experts implementation of an arm, and whether this library's loop runs it.

    >>> split_arm("stock+loop")
    ('stock', True)
    """
    return arm.removesuffix(LOOP), arm.endswith(LOOP)
