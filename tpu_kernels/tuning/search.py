"""The search: candidates of many problems, tried in processes side by side."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..analysis import cache
from ..analysis.compiler import DEFAULT_TIMEOUT
from ..analysis.simulator.fingerprint import simulator_fingerprint
from . import trial
from .problems import Task
from .subject import Subject

Evidence = Literal["simulated", "measured"]
# A candidate takes the place of the kernel's own choice for at least so much.
_LEAST_GAIN = 0.002


@dataclass(frozen=True)
class Trial:
    """A config that was tried.

    Attributes:
        config: The kernel's record of it.
        time_ms: Of the problem; None where it failed.
        failure: Why.
    """

    config: Any
    time_ms: float | None
    failure: str | None = None


@dataclass(frozen=True)
class Tuned:
    """What the search found for a problem.

    Attributes:
        task: The problem.
        trials: What was tried, in the order of the candidates: the first is what the kernel chooses by itself.
        evidence: How times came about.
    """

    task: Task
    trials: tuple[Trial, ...]
    evidence: Evidence

    @property
    def heuristic(self) -> Trial:
        """What the kernel chooses by itself."""
        return self.trials[0]

    @property
    def best(self) -> Trial | None:
        """The fastest; the kernel's own choice where others are hardly faster; None where all failed."""
        done = [trial for trial in self.trials if trial.time_ms is not None]
        if not done:
            return None
        best = min(done, key=lambda trial: trial.time_ms or 0.0)
        own = self.heuristic.time_ms
        assert best.time_ms is not None
        return self.heuristic if own is not None and best.time_ms > own * (1 - _LEAST_GAIN) else best

    @property
    def gain(self) -> float | None:
        """How much faster the best is than the kernel's own choice, as a fraction; None where either failed."""
        best = self.best
        if best is None or best.time_ms is None or self.heuristic.time_ms is None:
            return None
        return self.heuristic.time_ms / best.time_ms - 1


def tune(
    subject: Subject,
    tasks: Sequence[Task],
    *,
    limit: int = 8,
    workers: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    evidence: Evidence = "simulated",
    on_trial: Callable[[Task, Trial], None] = lambda task, trial: None,
    on_tuned: Callable[[Tuned], None] = lambda tuned: None,
) -> list[Tuned]:
    """Tries the likeliest candidates of each problem.

    What was tried is kept (`TPU_KERNELS_CACHE`/tune), by the content of the kernel, the simulator and the problem: a
    search that was cut short, or that is done again with a larger limit, tries what is left.

    Args:
        subject: The kernel.
        tasks: Its problems.
        limit: Candidates for each problem, at most.
        workers: Processes; as many as there are cores unless given. A measurement has the TPU for itself.
        timeout: Of the compiler, for each candidate, in seconds.
        evidence: Simulated, or measured on the TPU of this machine.
        on_trial: Is called with each trial as it comes.
        on_tuned: Is called with each problem as soon as all its candidates were tried.

    Returns:
        What was found, in the order of the tasks.

    Raises:
        TuningError: There is no TPU of that generation to measure on.
        AnalysisError: The compiler is not installed or does not run here.
    """
    configs = [list(task.problem.candidates(task.tpu))[:limit] for task in tasks]
    trials: list[dict[int, Trial]] = [{} for _ in tasks]
    tuned: dict[int, Tuned] = {}

    def finish(number: int, place: int, tried: Trial) -> None:
        trials[number][place] = tried
        on_trial(tasks[number], tried)
        if len(trials[number]) == len(configs[number]):
            ordered = tuple(trials[number][n] for n in range(len(configs[number])))
            tuned[number] = Tuned(tasks[number], ordered, evidence)
            on_tuned(tuned[number])

    keys: dict[tuple[int, int], str] = {}
    for number, task in enumerate(tasks):
        for place, config in enumerate(configs[number]):
            key = keys[number, place] = _key(subject, task, config, evidence)
            kept = cache.read("tune", key, _parse)
            if kept is not None:
                finish(number, place, Trial(config, *kept))
    left = [where for where in keys if where[1] not in trials[where[0]]]
    if left:
        run = trial.measured if evidence == "measured" else trial.simulated
        processes = 1 if evidence == "measured" else workers or len(os.sched_getaffinity(0))
        pool = concurrent.futures.ProcessPoolExecutor(
            min(processes, len(left)),
            # (Threads of JAX do not survive a fork.)
            multiprocessing.get_context("spawn"),
            trial.load,
            (str(subject.path), os.getpid()),
        )
        try:
            futures = {
                pool.submit(run, tasks[number], configs[number][place], timeout): (number, place)
                for number, place in left
            }
            for future in concurrent.futures.as_completed(futures):
                number, place = futures[future]
                result = future.result()
                if isinstance(result, trial.Failed):
                    tried, lasting = Trial(configs[number][place], None, result.reason), result.lasting
                else:
                    tried, lasting = Trial(configs[number][place], result), True
                if lasting:
                    cache.write("tune", keys[number, place], json.dumps([tried.time_ms, tried.failure]))
                finish(number, place, tried)
        finally:
            # After an error or an interrupt, what has not started is not started.
            pool.shutdown(cancel_futures=True)
    return [tuned[number] for number in range(len(tasks))]


def _key(subject: Subject, task: Task, config: Any, evidence: Evidence) -> str:
    problem = [task.problem.operation, dict(task.problem.dimensions), dict(task.problem.variant)]
    made_by = simulator_fingerprint() if evidence == "simulated" else None
    values = dataclasses.asdict(config)
    return cache.digest(evidence, made_by, subject.fingerprint, task.tpu, problem, values, task.data_digest)


def _parse(text: str) -> tuple[float | None, str | None]:
    time_ms, failure = json.loads(text)
    return time_ms, failure
