"""A projection as tables and text, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..analysis.sizes import format_bytes
from .result import Projection, Range, Row

if TYPE_CHECKING:
    from rich.table import Table

_SHOWN_FINDINGS = 4


def render(projection: Projection) -> list[Any]:
    """What to print, one after another: tables of rich, and lines."""
    return [
        "\n".join(_head(projection)),
        _steps(projection),
        _places(projection),
        "\n".join(
            [
                *_reasons(projection),
                *_ratios(projection),
                *_findings(projection),
                *_published(projection),
                *_foot(projection),
            ]
        ),
    ]


def _head(projection: Projection) -> Iterator[str]:
    asked = projection.transformers or "transformers 5.24 cannot be asked for it"
    yield (
        f"{projection.model} ({projection.kind}, {_count(projection.parameters)} parameters) on {projection.tpu}, "
        f"{projection.parallel}: one decode step over {projection.context} keys"
    )
    yield f"plan: {asked}"
    yield "PROJECTED from the compiler's schedules, not measured: nothing was run on a TPU"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.1f} million"


def _range(values: Range, digits: int = 1) -> str:
    return f"{values.low:.{digits}f} – {values.high:.{digits}f}"


def _name(row: Row) -> str:
    return f"{row.arm.experts}, {row.arm.attention}"


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        named = column == "experts, attention"
        table.add_column(column, justify="left" if named else "right", no_wrap=named)
    return table


def _steps(projection: Projection) -> Table:
    table = _table(
        "one step, projected",
        *("batch", "experts, attention", "floor ms", "device ms", "worst routing ms", "step ms", "tokens/s"),
        *("HBM a chip", "fits"),
    )
    for row in projection.rows:
        if row.not_projected:
            table.add_row(str(row.batch), _name(row), "not projected")
            continue
        table.add_row(
            str(row.batch),
            _name(row),
            f"{row.floor_ms:.1f}",
            _range(row.device_ms),
            f"{row.worst_ms:.1f}",
            _range(row.step_ms),
            _range(row.tokens_per_s, 0),
            format_bytes(row.hbm_bytes),
            "yes" if row.fits else f"no, of {format_bytes(projection.usable_hbm_bytes)}",
        )
    return table


def _places(projection: Projection) -> Table:
    places = list(dict.fromkeys(place for row in projection.rows for place in row.where))
    table = _table(
        "where it goes: ms that the core is busy, and exchange", "batch", "experts, attention", *places
    )
    for row in projection.rows:
        if not row.not_projected:
            table.add_row(str(row.batch), _name(row), *(f"{row.where.get(place, 0):.2f}" for place in places))
    return table


def _reasons(projection: Projection) -> Iterator[str]:
    for row in projection.rows:
        if row.not_projected:
            yield f"not projected, {_name(row)}, batch {row.batch}: {row.not_projected}"


def _ratios(projection: Projection) -> Iterator[str]:
    for ratio in projection.ratios:
        yield (
            f"ours : published kernel, batch {ratio.batch}: {_range(ratio.device, 2)} times the tokens/s on the "
            f"device alone, {_range(ratio.with_generate, 2)} with generate's host part in both"
        )


def _findings(projection: Projection) -> Iterator[str]:
    """Of the largest batch; `--json` has all."""
    largest = max(row.batch for row in projection.rows)
    arms: dict[str, list[str]] = {}
    for row in projection.rows:
        if row.batch == largest:
            for finding in row.findings[:_SHOWN_FINDINGS]:
                arms.setdefault(finding, []).append(_name(row))
    if arms:
        yield f"to fix, batch {largest}:"
    yield from (f"  - {finding} ({'; '.join(names)})" for finding, names in arms.items())


def _published(projection: Projection) -> Iterator[str]:
    if not projection.comparisons:
        return
    yield f"against published steps, measured by others ({projection.published}):"
    for each in projection.comparisons:
        fitted = ", which the host's part is fitted on" if each.fitted else ""
        yield (
            f"  arm {each.arm}, batch {each.batch}: {each.published_ms:.1f} ms, projected with generate "
            f"{each.projected_ms:.1f} ms ({each.deviation:+.0%}{fitted})"
        )


def _foot(projection: Projection) -> Iterator[str]:
    yield "device: from all transfers hidden behind work to none, with expected routing; simulated, " + (
        f"kernels with a mean error of {projection.error:.1%} on records"
        if projection.error
        else "no records"
    )
    yield "step: from that with a loop on the device to the worst routing with transformers' generate"
    yield "stated, not simulated:"
    yield from (f"  - {term}" for term in projection.terms)
