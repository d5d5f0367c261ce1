"""What a kernel does to memory, by Pallas' TPU interpreter: races, bounds, and what was never written."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from typing import Any

from ...analysis.target import parse_target
from ..examples import Example
from .report import Finding
from .subject import Subject, guarded

_FRAME = re.compile(r"(\S+\.py):(\d+)")


def check_memory(subject: Subject) -> Iterator[Finding]:
    """Memory: data races between DMAs and the core, reads out of bounds, results of uninitialised memory."""
    findings: list[Finding] = []
    for example in subject.some(subject.examples):
        with guarded(subject, example, findings), _interpreter(subject.generation):
            findings += _look(subject, example)
    yield from findings


def _look(subject: Subject, example: Example) -> Iterator[Finding]:
    import jax
    import numpy as np
    from jax.experimental.pallas import tpu as pltpu

    # "padded": reading a tile's padding is what the hardware does; whatever stands there must not matter.
    interpret = pltpu.InterpretParams(
        detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan", buffer_bounds="padded"
    )
    said = io.StringIO()
    with parse_target(subject.generation).mesh(), contextlib.redirect_stdout(said):
        results = jax.block_until_ready(example.kernel(subject.generation, interpret)(example.arrays))
    if _races_found():
        yield _race(subject, example, said.getvalue())
    for result, expected in zip(jax.tree.leaves(results), example.expected(), strict=True):
        spoilt = np.isnan(np.asarray(result).astype(np.float64)) & ~np.isnan(expected)
        if spoilt.any():
            at = [int(axis) for axis in np.argwhere(spoilt)[0]]
            message = (
                f"{example.name}: uninitialised memory reaches {np.count_nonzero(spoilt)} of {spoilt.size} elements of "
                f"the result, first {at}: mask what lies past the end of a block, and write scratch before reading it"
            )
            yield subject.error(message, example.op.jax_fn)


def _race(subject: Subject, example: Example, said: str) -> Finding:
    """The first of the races that the interpreter has told of."""
    text = said.partition("RACE DETECTED")[2].partition("RACE DETECTED")[0]
    ways = re.findall(r"^ *(read|write) of", text, re.MULTILINE)
    places = [subject.locate(path, int(line)) for path, line in _FRAME.findall(text)]
    file, line = next((place for place in places if place[0] is not None), (None, None))
    between = " and a ".join(ways) or "accesses"
    others = [f"{other}:{at}" for other, at in places if other and (other, at) != (file, line)]
    message = (
        f"{example.name}: race between a {between}{' at ' + ', '.join(others) if others else ''} that nothing orders: "
        "wait for the DMA before its memory is used"
    )
    return Finding("error", message, file, line)


def _races_found() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    races: Any = interpret_pallas_call.races
    return bool(races is not None and races.races_found)


@contextlib.contextmanager
def _interpreter(generation: str) -> Iterator[None]:
    """A fresh interpreter, whose own threads take this machine for a TPU of that generation."""
    from jax._src.pallas.mosaic import tpu_info
    from jax.experimental.pallas import tpu as pltpu

    with parse_target(generation).mesh():
        info = pltpu.get_tpu_info()
    former = tpu_info.registry.get("cpu")
    tpu_info.registry["cpu"] = lambda: info
    try:
        yield
    finally:
        pltpu.reset_tpu_interpret_mode_state()
        tpu_info.registry.pop("cpu")
        if former is not None:
            tpu_info.registry["cpu"] = former
