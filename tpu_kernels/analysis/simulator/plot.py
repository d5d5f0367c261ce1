"""Profiles as a roofline chart."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence

from ...errors import AnalysisError
from .calibration import load_calibration
from .profile import Profile


def check_available() -> None:
    """Refuses to promise a plot that could not be drawn in the end."""
    if importlib.util.find_spec("matplotlib") is None:
        raise AnalysisError("plots need matplotlib, which is not installed; install tpu-kernels[bench]")


def draw_rooflines(profiles: Sequence[Profile]) -> bytes:
    """Each profile as a point under its generation's roofline, as a PNG.

    Flops a second over flops a byte: the slope is attainable HBM bandwidth, the flat part the published peak.
    """
    import numpy as np
    from matplotlib.figure import Figure

    # A figure made directly, not by pyplot, needs no display and leaves no global state.
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    intensities = [p.roofline.flops / p.roofline.hbm_bytes for p in profiles]
    low, high = min(1.0, *intensities) / 2, max(10_000.0, *intensities) * 2
    span = np.geomspace(low, high, 200)
    for number, generation in enumerate(sorted({profile.generation for profile in profiles})):
        calibration = load_calibration(generation)
        color = f"C{number}"
        roof = np.minimum(span * calibration.memory.attainable_gbps / 1e3, calibration.peak_tflops)
        axes.plot(span, roof, color=color, label=f"{generation} roofline")
        for profile, intensity in zip(profiles, intensities, strict=True):
            if profile.generation == generation:
                speed = profile.roofline.flops / profile.time_ms / 1e9
                axes.plot([intensity], [speed], "o", color=color)
                axes.annotate(
                    f"{profile.function}\n{profile.roofline.ratio:.0%}",
                    (intensity, speed),
                    textcoords="offset points",
                    xytext=(6, -14),
                    fontsize=7,
                )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("flops per byte of HBM traffic")
    axes.set_ylabel("TFLOP/s (simulated)")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    errors = [
        f"{p.generation} ± {p.error:.1%}" for p in {p.generation: p for p in profiles}.values() if p.error
    ]
    figure.supxlabel(f"simulated, not measured; mean error: {', '.join(errors) or 'not known'}", fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return picture.getvalue()
