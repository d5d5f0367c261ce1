"""A decode benchmark's result as a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from .results import ArmResult, DecodeResult, Difference, Summary


def render(result: DecodeResult) -> Group:
    """The table, with the device in its title and, unless that is a TPU, a caution in title and footer."""
    config = result.config
    not_tpu = " – not TPU speeds" if result.caution else ""
    table = Table(
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        title=Text(f"Decode of {config.model}: {result.device}{not_tpu}"),
        caption=Text(
            f"{result.model}. Prompt {config.prompt_length}, {config.new_tokens} steps, "
            f"{config.repeats} runs: median and quartiles. Evidence: {result.evidence}."
        ),
        caption_justify="left",
    )
    table.add_column("experts", no_wrap=True)
    for heading in ("batch", "tokens/s", "step ms", "host ms", "prefill ms", "first run s", "graphs"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("tokens", overflow="fold")
    for arm in result.arms:
        # As `Text`: names and reasons may hold what rich would take for markup.
        table.add_row(*(Text(cell) for cell in (arm.experts, str(arm.batch), *_cells(arm))))
    notes = [Text(note) for note in _notes(result)]
    if result.caution:
        notes.append(Text(result.caution, style="bold"))
    return Group(table, *notes)


def _cells(arm: ArmResult) -> list[str]:
    measurement = arm.measurement
    if measurement is None:
        return [*["–"] * 6, "not run"]
    graphs = str(measurement.graphs)
    if measurement.late_graphs:
        graphs += f" + {measurement.late_graphs}"
    if measurement.recompile_limit_hit:
        graphs += " (limit)"
    return [
        _with_quartiles(measurement.tokens_per_s),
        _with_quartiles(measurement.step_ms),
        _number(measurement.host_ms.median),
        _number(measurement.prefill_ms.median),
        f"{measurement.first_run_s:.1f}",
        graphs,
        _tokens(arm.experts, measurement.reference, measurement.difference),
    ]


def _with_quartiles(summary: Summary) -> str:
    return f"{_number(summary.median)} [{_number(summary.low)}–{_number(summary.high)}]"


def _number(value: float) -> str:
    """Four digits where that takes no exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _tokens(arm: str, reference: str, difference: Difference | None) -> str:
    if difference is not None:
        return f"differ from {reference} at row {difference.row}, token {difference.position}"
    return "the reference" if arm == reference else f"as {reference}"


def _notes(result: DecodeResult) -> Iterator[str]:
    failures: dict[tuple[str, str], list[int]] = {}
    for arm in result.arms:
        if arm.not_run is not None:
            failures.setdefault((arm.experts, arm.not_run), []).append(arm.batch)
    for (name, reason), batches in failures.items():
        yield f"{name} at batch {', '.join(map(str, batches))} not run: {reason}"
    for name, runs_as in {arm.experts: arm.runs_as for arm in result.arms}.items():
        if runs_as != name:
            yield f"{name} runs as {runs_as}."
    measurements = [arm.measurement for arm in result.arms if arm.measurement is not None]
    if any(measurement.recompile_limit_hit for measurement in measurements):
        yield "(limit): torch's recompile limit was hit, and steps after it ran op by op."
    if any(measurement.late_graphs for measurement in measurements):
        yield "+ n: so many graphs were compiled during the timed runs; their time is in the figures."
