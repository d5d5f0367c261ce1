"""The calibration's worth as a table and as a picture."""

from __future__ import annotations

import io
import statistics

from benchmarks.calibration.fitting import Subject
from benchmarks.calibration.records import FAMILIES
from tpu_kernels.analysis.simulator.calibration import load_calibration

_HEAD = """# How well simulated times agree with recorded ones

Written by `python -m benchmarks.calibration report`. Times recorded on real TPUs (tokamax 0.0.17's autotuning records,
Apache-2.0, in `benchmarks/calibration/tpu_timings.jsonl`) against simulated ones: kernels, and XLA's ops beside them by
their bytes, as the records are of both. "Fitted" records had a part in the constants, "held out" ones had none; both
halves are by problem. The roofline is the larger of flops over published peak and operands' bytes over published
bandwidth.

| TPU | kernels | records | held out | mean error, fitted | mean error, held out | largest, held out | \
roofline, held out |
|---|---|---|---|---|---|---|---|
"""


def write_table(subjects: dict[str, list[Subject]], ranking: dict[str, tuple[int, int]]) -> str:
    """The errors by generation and family, in Markdown."""
    lines = []
    for generation, those in subjects.items():
        calibration = load_calibration(generation)
        for family in FAMILIES.values():
            errors: dict[bool, list[float]] = {True: [], False: []}
            rooflines = []
            for subject in those:
                if subject.record.family == family:
                    errors[subject.record.fitted].append(abs(subject.error(calibration)))
                    if not subject.record.fitted:
                        rooflines.append(abs(subject.roofline_error(calibration)))
            fitted, held = errors[True], errors[False]
            if fitted or held:
                cells = [generation, family, str(len(fitted) + len(held)), str(len(held))]
                cells += [_percent(statistics.fmean(fitted)) if fitted else "-"]
                cells += [_percent(f(held)) if held else "-" for f in (statistics.fmean, max)]
                cells += [_percent(statistics.fmean(rooflines)) if rooflines else "-"]
                lines.append(f"| {' | '.join(cells)} |")
    ranked = [f"{name} {hits} of {count}" for name, (hits, count) in ranking.items() if count]
    return (
        _HEAD
        + "\n".join(lines)
        + "\n\nOf problems that were solved in several ways (tiles, or versions of a kernel), the way that is\n"
        + "simulated to be the fastest is within 3 % of the one measured to be: "
        + ", ".join(ranked)
        + ".\n\n![simulated over recorded times](images/calibration.png)\n"
    )


def draw(subjects: dict[str, list[Subject]]) -> bytes:
    """Simulated over recorded times, a point a record, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.add_subplot()
    markers = dict(zip(FAMILIES.values(), "os^v", strict=True))
    low, high = float("inf"), 0.0
    for number, (generation, those) in enumerate(subjects.items()):
        calibration = load_calibration(generation)
        for family, marker in markers.items():
            for held in (True, False):
                points = [
                    (s.record.median_ms, s.simulated_ms(calibration))
                    for s in those
                    if s.record.family == family and s.record.fitted is not held
                ]
                if not points:
                    continue
                recorded, simulated = zip(*points, strict=True)
                low, high = min(low, *recorded), max(high, *recorded)
                label = f"{generation}, {family}{'' if held else ' (fitted)'}"
                face = f"C{number}" if held else "none"
                axes.plot(recorded, simulated, marker, mfc=face, mec=f"C{number}", label=label, ms=5)
    axes.plot([low, high], [low, high], color="gray", lw=0.8, zorder=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("recorded on a TPU, ms")
    axes.set_ylabel("simulated, ms")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def _percent(value: float) -> str:
    return f"{value:.1%}"
