"""The tables that kernels look configs up in: see `tpu_kernels.ops.tables`."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..analysis.cache import versions
from ..errors import TuningError
from ..ops.tables import parse
from .search import Tuned


def write_table(path: Path, found: Iterable[Tuned]) -> None:
    """Adds what was found to a table, in place of entries for the same problems.

    Args:
        path: The file, which need not be there yet.
        found: Of one generation. Problems for which everything failed are left out.

    Raises:
        TuningError: It cannot be written.
    """
    try:
        entries = {
            _key(entry): entry for entry in (parse(path.read_bytes(), str(path)) if path.exists() else [])
        }
        entries |= {_key(entry): entry for tuned in found if (entry := _entry(tuned)) is not None}
        lines = [json.dumps(entries[key], sort_keys=True) for key in sorted(entries)]
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=".", delete=False, encoding="utf-8"
        ) as draft:
            draft.write("[\n" + ",\n".join(lines) + "\n]\n")
        Path(draft.name).chmod(0o644)
        Path(draft.name).replace(path)
    except OSError as error:
        raise TuningError(
            f"the table {path} cannot be written: {error}; give another folder with --out"
        ) from error


def _entry(tuned: Tuned) -> dict[str, Any] | None:
    best, problem = tuned.best, tuned.task.problem
    if best is None:
        return None
    return {
        "operation": problem.operation,
        "variant": dict(problem.variant),
        "dimensions": dict(problem.dimensions),
        "config": dataclasses.asdict(best.config),
        "evidence": tuned.evidence,
        "time_ms": _rounded(best.time_ms),
        "heuristic_ms": _rounded(tuned.heuristic.time_ms),
        "candidates": len(tuned.trials),
        "cases": list(tuned.task.cases),
        "versions": {name: version for name, version in versions().items() if name != "jaxlib"},
    }


def _key(entry: Mapping[str, Any]) -> str:
    return json.dumps([entry["operation"], entry["variant"], entry["dimensions"]], sort_keys=True)


def _rounded(time_ms: float | None) -> float | None:
    return None if time_ms is None else float(f"{time_ms:.5g}")
