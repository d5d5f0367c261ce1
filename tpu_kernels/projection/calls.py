"""Kernel calls that were cut out of programs, as jobs for the simulator."""

from __future__ import annotations

from typing import Any

from ..analysis import Job
from ..hub import get_kernel
from .records import CutCall
from .routing import Routing


def call_job(call: CutCall, routing: Routing | None, tpu: str) -> Job:
    """A call on arrays of its shapes, with the integers that its kernels' control flow depends on.

    Args:
        call: What was cut.
        routing: Of the experts' tokens.
        tpu: The target.
    """
    import jax
    import numpy as np

    arrays = {name: jax.ShapeDtypeStruct(*array) for name, array in call.arrays.items()}
    data: dict[str, Any] = {}
    if routing is not None:
        known = {"top_k_index": np.array(routing.index), "group_sizes": np.array(routing.group_sizes)}
        data = {name: integers for name, integers in known.items() if name in arrays}
    if call.op == "decode_attention":
        # The cache is full.
        data["lengths"] = np.full(arrays["lengths"].shape, call.arrays["key"][0][2])
        if "starts" in arrays:
            data["starts"] = np.zeros(arrays["starts"].shape, int)
    if call.kernel is None:
        from . import composed

        arguments = tuple(arrays[name] for name in ("rows", "weights", "group_sizes"))
        return Job(composed.jax_grouped_matmul, arguments, tpu, data=data, every_schedule=True)
    repository, version = call.kernel
    op = getattr(get_kernel(repository, version=version), call.op)
    return Job(op, (), tpu, {**arrays, **call.static}, data, every_schedule=True)
