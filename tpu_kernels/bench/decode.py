"""Decode throughput of a causal language model, one experts implementation beside another.

What is timed is greedy decoding with a static cache, by `model.generate`, because that is what people run, or by
`tpu_kernels.generate`. A streamer sees the tokens come, so prefill and compilation stay out of a step's time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import logging
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, get_args

from ..errors import BenchmarkError, first_line
from ..packages import computing_versions
from .placement import place
from .ranks import plan_of
from .results import (
    STOCK,
    ArmResult,
    DecodeConfig,
    DecodeResult,
    DeviceChoice,
    Difference,
    DtypeChoice,
    Measurement,
    Summary,
    split_arm,
)
from .subject import Subject, experts_registered, load

if TYPE_CHECKING:
    import torch

Observer = Callable[[str], None]
"""Told, before each of the `DecodeConfig.phases` runs of the model, what it is."""


def run(config: DecodeConfig, observe: Observer = lambda phase: None) -> DecodeResult:
    """Runs a decode benchmark.

    Everything that can be refused is refused before anything is compiled, with one `TpuKernelsError`. An arm
    that fails later is reported as not run, with its reason, and the others go on.

    Args:
        config: What to run. With ``device="emulated"``, torch must not have been imported yet.
        observe: Called with the name of each run of the model before it starts.

    Example:
        >>> result = run(DecodeConfig("preset:mixtral", experts=("stock", "eager"), batches=(1, 8)))
        >>> for arm in result.arms:
        ...     print(arm.experts, arm.batch, arm.not_run or arm.measurement.tokens_per_s.median)
    """
    if importlib.util.find_spec("transformers") is None:
        raise BenchmarkError(
            "benchmarks need transformers, which is not installed; install tpu-kernels[bench]"
        )
    _check_values(config)
    placement = place(config.device, plan_of(config))
    started = datetime.now(UTC).isoformat(timespec="seconds")
    outcomes: dict[tuple[str, int], _Outcome | str] = {}
    with experts_registered(config.experts):
        subject = load(config, placement)
        for arm, batch in itertools.product(config.experts, config.batches):
            outcomes[arm, batch] = _attempt(subject, arm, batch, config, observe)
        arms = tuple(_arm_result(subject, arm, batch, config, outcomes) for arm, batch in outcomes)
    return DecodeResult(
        config=config,
        evidence=placement.evidence,
        device=placement.description,
        model=subject.description,
        versions={"python": platform.python_version()} | computing_versions(),
        started=started,
        arms=arms,
    )


def _check_values(config: DecodeConfig) -> None:
    for name, choice, choices in (
        ("device", config.device, get_args(DeviceChoice)),
        ("dtype", config.dtype, get_args(DtypeChoice)),
    ):
        if choice not in choices:
            raise BenchmarkError(f"there is no {name} {choice!r}; choose one of {', '.join(choices)}")
    for name, values in (("experts", config.experts), ("batch", config.batches)):
        if not values:
            raise BenchmarkError(f"{name} is empty; give at least one")
        if len(set(values)) < len(values):
            raise BenchmarkError(f"{name} {','.join(map(str, values))} names one twice; give each once")
    for name, value in (
        *(("batch", batch) for batch in config.batches),
        ("prompt length", config.prompt_length),
        ("new tokens", config.new_tokens),
        ("repeats", config.repeats),
    ):
        if value < 1:
            raise BenchmarkError(f"{name} is {value}; it must be at least 1")


@dataclass
class _Clock:
    """A streamer that notes when `generate` hands over the prompt, and then the tokens of each step.

    Attributes:
        times: The clock's.
        busy: The thread's processor time.
    """

    times: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.busy.append(time.thread_time())

    def end(self) -> None:
        pass


@dataclass(frozen=True)
class _Timing:
    """One run of the model, in seconds, and the tokens it made, a row a sequence.

    Attributes:
        decode: All steps.
        steps: Each step, or, of a dispatch of several, their mean.
        host: What the thread was busy for a step.
    """

    total: float
    prefill: float
    decode: float
    steps: tuple[float, ...]
    host: float
    tokens: torch.Tensor


@dataclass(frozen=True)
class _Outcome:
    """All runs of one arm at one batch size."""

    first: _Timing
    repeats: tuple[_Timing, ...]
    graphs: int
    late_graphs: int
    recompile_limit_hit: bool


def _attempt(
    subject: Subject, arm: str, batch: int, config: DecodeConfig, observe: Observer
) -> _Outcome | str:
    """Runs one arm at one batch size; if it cannot run here, says why."""
    names = ("first run", *(f"run {number} of {config.repeats}" for number in range(1, config.repeats + 1)))
    phases = iter([f"{arm}, batch {batch}: {name}" for name in names])
    try:
        return _run_arm(subject, arm, batch, config, lambda: observe(next(phases)))
    # An arm is somebody else's code on a device of any kind: whatever it raises is the reason it did not run.
    except Exception as error:  # noqa: BLE001
        for phase in phases:
            observe(phase)
        return first_line(error)


def _run_arm(
    subject: Subject, arm: str, batch: int, config: DecodeConfig, next_phase: Callable[[], None]
) -> _Outcome:
    import torch
    from torch._dynamo.utils import counters

    subject.use(arm)
    # As if alone in the process: what another arm compiled would count toward torch's recompile limit.
    for compiled in ("_compiled_call", "_tpu_kernels_programs"):
        vars(subject.model).pop(compiled, None)
    torch._dynamo.reset()
    counters.clear()
    with _recompile_limit_hits() as limit_hits:
        next_phase()
        first = _generate(subject, arm, batch, config)
        graphs = counters["stats"]["unique_graphs"]
        repeats = []
        for _ in range(config.repeats):
            next_phase()
            repeats.append(_generate(subject, arm, batch, config))
        late_graphs = counters["stats"]["unique_graphs"] - graphs
    return _Outcome(first, tuple(repeats), graphs, late_graphs, bool(limit_hits))


def _generate(subject: Subject, arm: str, batch: int, config: DecodeConfig) -> _Timing:
    import torch
    from transformers import GenerationConfig

    from ..generation.loop import STEPS, generate

    def synchronize() -> None:
        if subject.placement.torch_device != "cpu":
            torch.accelerator.synchronize()

    prompt = subject.prompts[batch]
    clock = _Clock()
    _, loop = split_arm(arm)
    call = functools.partial(generate, subject.model) if loop else subject.model.generate
    synchronize()
    start = time.perf_counter()
    sequences = call(
        prompt,
        attention_mask=torch.ones_like(prompt),
        generation_config=GenerationConfig(
            max_new_tokens=config.new_tokens + 1,
            do_sample=False,
            cache_implementation=None if loop else "static",
        ),
        streamer=clock,
    )
    synchronize()
    total = time.perf_counter() - start
    prompt_time, *token_times = clock.times
    # A dispatch hands its tokens over at once.
    ends = [*range(0, config.new_tokens, STEPS if loop else 1), config.new_tokens]
    return _Timing(
        total=total,
        prefill=token_times[0] - prompt_time,
        decode=token_times[-1] - token_times[0],
        steps=tuple(
            (token_times[end] - token_times[begin]) / (end - begin) for begin, end in itertools.pairwise(ends)
        ),
        host=(clock.busy[-1] - clock.busy[1]) / config.new_tokens,
        tokens=sequences[:, prompt.shape[1] :].cpu(),
    )


@contextlib.contextmanager
def _recompile_limit_hits() -> Iterator[list[str]]:
    """Collects torch's warnings that a recompile limit was hit; printed, each is a page of stack trace."""
    hits: list[str] = []

    def passes(record: logging.LogRecord) -> bool:
        if "torch._dynamo hit config." not in str(record.msg):
            return True
        hits.append(record.getMessage())
        return False

    logger = logging.getLogger("torch._dynamo.convert_frame")
    logger.addFilter(passes)
    try:
        yield hits
    finally:
        logger.removeFilter(passes)


def _arm_result(
    subject: Subject,
    arm: str,
    batch: int,
    config: DecodeConfig,
    outcomes: Mapping[tuple[str, int], _Outcome | str],
) -> ArmResult:
    outcome = outcomes[arm, batch]
    if isinstance(outcome, str):
        return ArmResult(arm, subject.runs_as(arm), batch, measurement=None, not_run=outcome)
    ran = {name: other for name in config.experts if not isinstance(other := outcomes[name, batch], str)}
    reference = STOCK if STOCK in ran else next(iter(ran))
    prefill_ms = tuple(timing.prefill * 1e3 for timing in outcome.repeats)
    step_ms = tuple(tuple(step * 1e3 for step in timing.steps) for timing in outcome.repeats)
    measurement = Measurement(
        first_run_s=outcome.first.total,
        prefill_ms=Summary.of(prefill_ms),
        step_ms=Summary.of(list(itertools.chain.from_iterable(step_ms))),
        host_ms=Summary.of([timing.host * 1e3 for timing in outcome.repeats]),
        tokens_per_s=Summary.of([batch * config.new_tokens / timing.decode for timing in outcome.repeats]),
        graphs=outcome.graphs,
        late_graphs=outcome.late_graphs,
        recompile_limit_hit=outcome.recompile_limit_hit,
        reference=reference,
        difference=_first_difference(outcome.repeats[-1].tokens, ran[reference].repeats[-1].tokens),
        prefill_samples_ms=prefill_ms,
        step_samples_ms=step_ms,
    )
    return ArmResult(arm, subject.runs_as(arm), batch, measurement, not_run=None)


def _first_difference(tokens: torch.Tensor, reference: torch.Tensor) -> Difference | None:
    places = (tokens != reference).nonzero().tolist()
    if not places:
        return None
    row, position = min(places, key=lambda place: (place[1], place[0]))
    return Difference(row, position)
