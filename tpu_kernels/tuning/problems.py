"""Which problems a kernel chooses configs for, in models' layers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..analysis.compiler import Job
from ..analysis.export import bind
from ..analysis.target import parse_target
from ..analysis.workload import find_cases
from ..errors import TuningError
from ..ops.tables import Problem
from .subject import Subject


@dataclasses.dataclass(frozen=True)
class Task:
    """A problem to be tuned.

    Attributes:
        problem: The problem.
        tpu: The generation.
        data: Integers that time depends on, by the name of the argument.
        cases: What it occurs in.
    """

    problem: Problem
    tpu: str
    data: Mapping[str, Any]
    cases: tuple[str, ...]

    def job(self, config: Any) -> Job:
        """The problem solved with `config`, to be simulated or measured."""
        function, arguments = self.problem.program(config)
        data = {name: values for name, values in self.data.items() if name in arguments}
        return Job(function, tuple(arguments.values()), self.tpu, data=data)

    @property
    def data_digest(self) -> str:
        """Names the integers."""
        text = json.dumps({name: list(map(int, _flat(values))) for name, values in sorted(self.data.items())})
        return hashlib.sha256(text.encode()).hexdigest()

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.problem.dimensions.items())
        return f"{self.problem.operation} {sizes}"


def find_tasks(
    subject: Subject, cases: Sequence[str], targets: Sequence[str], *, op: str | None = None
) -> list[Task]:
    """The problems of an op in models' layers, each once for each generation.

    The op is traced, with its gradient where a case is of training, and what it chooses configs for is written down.

    Args:
        subject: The kernel.
        cases: As `find_cases` knows them.
        targets: Generations.
        op: The kernel's op; the first of its cases unless given.

    Raises:
        AnalysisError: There is no such case or target, or the kernel has no such op in it.
        TuningError: The kernel cannot be tuned.
    """
    import jax

    tasks: dict[tuple[Any, str], Task] = {}
    for name in cases:
        for target in targets:
            compile_target = parse_target(target)
            generation = compile_target.generation
            # An op may be given what another is told: the layer as a whole has the experts of each token.
            known: dict[str, Any] = {}
            for case in find_cases(subject.module, name, tpu=target):
                known |= case.job.data
            for case in find_cases(subject.module, name, tpu=target, op=op):
                bound = bind(case.job.fn, case.job.args, case.job.static, generation)
                with compile_target.mesh(), subject.tables.recording() as problems:
                    jax.eval_shape(bound.function, *bound.arguments)
                for problem in problems:
                    if subject.tables.package_of(problem) != subject.module.__name__:
                        continue  # of a kernel that this one includes, which has tables of its own
                    known_task = tasks.get((problem, generation))
                    names = (*known_task.cases, case.name) if known_task else (case.name,)
                    data = known_task.data if known_task else {**known, **case.job.data}
                    tasks[problem, generation] = Task(problem, generation, data, names)
    if not tasks:
        raise TuningError(f"{subject.module.__name__} chooses no config in {', '.join(cases)}")
    return list(tasks.values())


def _flat(values: Any) -> list[Any]:
    import numpy as np

    flat: list[Any] = np.asarray(values).ravel().tolist()
    return flat
