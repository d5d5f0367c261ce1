"""Two decode benchmarks beside each other: which arms have become faster."""

from __future__ import annotations

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..errors import BenchmarkError
from .results import DecodeResult, Measurement


def compare(before: DecodeResult, after: DecodeResult) -> Group:
    """A table of the arms and batch sizes that both have, with the ratio of their throughputs.

    A difference is called one only where the quartiles of the two do not overlap.

    Raises:
        BenchmarkError: The two have nothing in common, or are not of the same kind.
    """
    if before.evidence != after.evidence:
        raise BenchmarkError(
            f"the first is {before.evidence}, the second {after.evidence}: their times have nothing to do with each "
            "other; compare two of a kind"
        )
    first, second = _measured(before), _measured(after)
    both = [key for key in second if key in first]
    if not both:
        raise BenchmarkError("the two have no arm and batch size in common; compare runs of the same arms")
    table = Table(
        box=box.SIMPLE_HEAD, title=Text(f"{before.config.model}, {before.started}, and {after.started}")
    )
    table.add_column("experts", no_wrap=True)
    for heading in ("batch", "tokens/s", "then", "ratio", "host ms", "then"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for name, batch in both:
        old, new = first[name, batch], second[name, batch]
        cells = (
            name,
            str(batch),
            f"{old.tokens_per_s.median:.4g}",
            f"{new.tokens_per_s.median:.4g}",
            f"{new.tokens_per_s.median / old.tokens_per_s.median:.2f}",
            f"{old.host_ms.median:.4g}",
            f"{new.host_ms.median:.4g}",
            _verdict(old, new),
        )
        table.add_row(*map(Text, cells))
    notes = [Text(note) for note in _notes(before, after)]
    if after.caution:
        notes.append(Text(after.caution, style="bold"))
    return Group(table, *notes)


def _measured(result: DecodeResult) -> dict[tuple[str, int], Measurement]:
    return {(arm.experts, arm.batch): arm.measurement for arm in result.arms if arm.measurement is not None}


def _verdict(old: Measurement, new: Measurement) -> str:
    if new.tokens_per_s.low > old.tokens_per_s.high:
        return "faster"
    if new.tokens_per_s.high < old.tokens_per_s.low:
        return "slower"
    return "within the spread"


def _notes(before: DecodeResult, after: DecodeResult) -> list[str]:
    """What else differs."""
    asked = ("model", "prompt_length", "new_tokens", "dtype")
    pairs = [(name, getattr(before.config, name), getattr(after.config, name)) for name in asked]
    pairs += [("device", before.device, after.device)]
    pairs += [(name, version, after.versions.get(name)) for name, version in before.versions.items()]
    return [f"{name.replace('_', ' ')}: {old}, then {new}." for name, old, new in pairs if old != new]
