"""The ranks that have a model between them: processes that ``tpu-kernels run`` has started."""

from __future__ import annotations

import os

from ..errors import BenchmarkError
from ..projection.plan import ParallelPlan, parse_plan
from .results import DecodeConfig


def is_first() -> bool:
    """Whether this process is the rank that reports, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def plan_of(config: DecodeConfig) -> ParallelPlan:
    """The plan of a benchmark, for which this process must be one of as many ranks.

    Raises:
        ProjectionError: It is no plan.
        BenchmarkError: There are other ranks, or none that can exchange anything.
    """
    plan = parse_plan(config.parallel)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != plan.chips:
        start = f"tpu-kernels run --nproc-per-node {plan.chips} " if plan.chips > 1 else ""
        raise BenchmarkError(
            f"plan {plan} takes {plan.chips} ranks, but this is one of {ranks}; start it with: "
            f"{start}{'-m tpu_kernels' if start else 'tpu-kernels'} bench decode --parallel {plan} ..."
        )
    if ranks > 1 and config.device == "emulated":
        raise BenchmarkError("ranks on emulated devices cannot exchange anything; give --device cpu")
    return plan
