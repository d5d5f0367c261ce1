"""Where in the model an op of a compiled program comes from, by the locations that `export` gave."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

_ROWS = {
    "FileNames": re.compile(r'^(\d+) "(.*)"$'),
    "FunctionNames": re.compile(r'^(\d+) "(.*)"$'),
    "FileLocations": re.compile(r"^(\d+) \{file_name_id=(\d+) "),
    # Parents are numbered from 1 on, 1 being none.
    "StackFrames": re.compile(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)"),
}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(.*\{$")
_OP = re.compile(r"^\s+(?:ROOT )?%(\S+) = ")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_FUSED = re.compile(r"\bcalls=%([\w.-]+)")


def read_places(hlo: str) -> dict[str, str]:
    """The part of the model that each op of a program is in, such as `attention`; ops that have none are left out.

    A fusion that has no location itself is where most of the ops in it are.
    """
    tables: dict[str, dict[int, tuple[str, ...]]] = defaultdict(dict)
    places: dict[str, str] = {}
    inside: dict[str, Counter[str]] = defaultdict(Counter)
    fusions: dict[str, str] = {}
    section = computation = ""
    for line in hlo.splitlines():
        if line in _ROWS:
            section = line
        elif section and (row := _ROWS[section].match(line)):
            tables[section][int(row[1])] = row.groups()[1:]
        elif header := _COMPUTATION.match(line):
            section, computation = "", header[1]
        elif op := _OP.match(line):
            frame = _FRAME.search(line)
            place = _place(int(frame[1]), tables) if frame else None
            if place:
                places[op[1]] = place
                inside[computation][place] += 1
            elif fused := _FUSED.search(line):
                fusions[op[1]] = fused[1]
    for name, called in fusions.items():
        if inside[called]:
            places[name] = inside[called].most_common(1)[0][0]
    return places


def _place(frame: int, tables: dict[str, dict[int, tuple[str, ...]]]) -> str | None:
    """Where a frame is, or else the one that called it."""
    while frame in tables["StackFrames"]:
        location, parent = tables["StackFrames"][frame]
        [file] = tables["FileLocations"].get(int(location), ("0",))
        [name] = tables["FileNames"].get(int(file), ("",))
        if place := _part(name):
            return place
        frame = int(parent) - 1
    return None


def _part(module: str) -> str | None:
    """The part that a module, given as `path:Class`, is of.

    Example:
        >>> _part("layer.self_attn.q_proj:Linear"), _part("layer.mlp.gate:Qwen3MoeTopKRouter")
        ('attention', 'router')
    """
    path, _, kind = module.rpartition(":")
    if not path or "/" in path:
        return None
    if "Experts" in kind or ".experts" in path:
        return "experts"
    if "Router" in kind or ".router" in path or path.endswith(".gate"):
        return "router"
    if "attn" in path or "attention" in path:
        return "attention"
    if "Norm" in kind:
        return "norms"
    if "lm_head" in path or "embed" in path:
        return "head"
    return "dense"
