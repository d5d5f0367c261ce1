"""A decode benchmark's result as a picture."""

from __future__ import annotations

import importlib.util
import io
import textwrap

from ..errors import BenchmarkError
from .results import DecodeResult


def check_available() -> None:
    """Refuses to promise a plot that could not be drawn in the end."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchmarkError("plots need matplotlib, which is not installed; install tpu-kernels[bench]")


def draw(result: DecodeResult) -> bytes:
    """Throughput over batch size, a line an arm, as a PNG that says what its figures are worth."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    # A figure made directly, not by pyplot, needs no display and leaves no global state.
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name in result.config.experts:
        points = [
            (arm.batch, arm.measurement.tokens_per_s)
            for arm in result.arms
            if arm.experts == name and arm.measurement is not None
        ]
        if not points:
            axes.plot([], [], label=f"{name} (not run)")
            continue
        batches = [batch for batch, _ in points]
        medians = [speed.median for _, speed in points]
        spread = [[s.median - s.low for _, s in points], [s.high - s.median for _, s in points]]
        axes.errorbar(batches, medians, yerr=spread, marker="o", capsize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(result.config.batches))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("batch (sequences)")
    axes.set_ylabel(f"decode tokens/s ({result.evidence}{', not TPU speed' if result.caution else ''})")
    axes.set_ylim(bottom=0)
    axes.set_title(f"Decode throughput: {result.config.model}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.supxlabel(_caption(result), fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return picture.getvalue()


def _caption(result: DecodeResult) -> str:
    config = result.config
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items() if version)
    paragraphs = (
        f"{result.evidence}: {result.device}. {result.model}. Prompt {config.prompt_length}, "
        f"{config.new_tokens} steps; median and quartiles of {config.repeats} runs. {versions}.",
        result.caution,
    )
    return "\n".join(line for paragraph in paragraphs if paragraph for line in textwrap.wrap(paragraph, 120))
