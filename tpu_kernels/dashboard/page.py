"""Facts as one HTML file: no script, style, font or picture is loaded from elsewhere."""

from __future__ import annotations

import functools
from importlib import resources
from typing import TYPE_CHECKING

from ..analysis.sizes import format_bytes
from .facts import Facts, KernelFacts, Run

if TYPE_CHECKING:
    from jinja2 import Template

_SPARK_WIDTH, _SPARK_HEIGHT = 64, 16


def render(facts: Facts) -> str:
    """The page.

    Args:
        facts: What it shows. All text in it is escaped.

    Example:
        >>> page = render(Facts(made="2030-01-01 00:00 UTC", versions={"jax": "0.12"}))
        >>> page.startswith("<!doctype html>")
        True
    """
    generations = [
        name
        for name in ("v4", "v5e", "v5p", "v6e", "tpu7x")
        if any(name in kernel.generations for kernel in facts.kernels)
    ]
    return _template().render(facts=facts, generations=generations)


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"bytes": format_bytes, "ms": _ms, "times": _times}
    environment.globals |= {"compiled": _compiled, "spark": _spark, "worst": _worst}
    text = resources.files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(text)


def _ms(value: float) -> str:
    return f"{value:.3g} ms" if value >= 1 else f"{value * 1e3:.3g} µs"


def _times(factor: float) -> str:
    return f"{factor:.2f}×" if factor < 10 else f"{factor:.0f}×"


def _compiled(runs: list[Run]) -> str:
    """How many of them compile."""
    done = sum(run.compiled for run in runs)
    return f"{done} of {len(runs)} compile" if done < len(runs) else f"{done} compile"


def _worst(runs: list[Run]) -> Run | None:
    """The run that is furthest above its floor."""
    return max((run for run in runs if run.over_floor), key=lambda run: run.over_floor or 0, default=None)


def _spark(facts: Facts, kernel: KernelFacts, run: Run) -> str:
    """The points of a line through the times of a call in a kernel's builds; empty where there is but one."""
    times = facts.trend(kernel, run)
    if len(times) < 2:
        return ""
    high = max(times)
    step = _SPARK_WIDTH / (len(times) - 1)
    return " ".join(
        f"{place * step:.1f},{_SPARK_HEIGHT - time / high * (_SPARK_HEIGHT - 2):.1f}"
        for place, time in enumerate(times)
    )
