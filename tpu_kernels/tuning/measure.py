"""Times on a real TPU. No TPU was here when this was written: it has not been run on one."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable
from typing import Any

from ..analysis.compiler import Job
from ..errors import TuningError
from ..ops.target import GENERATION_OF_KIND

_LEAST_SECONDS = 0.05  # of one timed run of calls
_ROUNDS = 5


def measure(job: Job) -> float:
    """How long one call of a JAX function takes on the TPU of this machine, in ms, dispatch excluded.

    Calls are queued and the device waited for at the end, once for a number of calls and once for twice as many: the
    difference is that of the calls alone. The median of several such differences is taken.

    Raises:
        TuningError: There is no TPU of that generation here.
    """
    import jax

    _check_device(job.tpu)
    names = list(inspect.signature(job.fn).parameters)
    arrays = [_array(shape, job.data.get(name)) for name, shape in zip(names, job.args, strict=False)]
    compiled = jax.jit(job.fn).lower(*arrays).compile()

    def run(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            result = compiled(*arrays)
        jax.block_until_ready(result)
        return time.perf_counter() - start

    return seconds_of_call(run) * 1e3


def seconds_of_call(run: Callable[[int], float]) -> float:
    """The seconds of a call, where `run(calls)` takes as long as all the calls and a fixed time.

    Example:
        >>> round(seconds_of_call(lambda calls: 0.01 + 0.002 * calls), 9)
        0.002
    """
    run(1)
    calls = 1
    while run(calls) < _LEAST_SECONDS:
        calls *= 2
    return statistics.median((run(2 * calls) - run(calls)) / calls for _ in range(_ROUNDS))


def _check_device(tpu: str) -> None:
    import jax

    device = jax.devices()[0]
    if device.platform != "tpu" or GENERATION_OF_KIND.get(device.device_kind) != tpu:
        raise TuningError(
            f"times on {tpu} can only be measured on one, and JAX has {device.device_kind} here; without --measure "
            f"they are simulated"
        )


def _array(shape: Any, values: Any) -> Any:
    import jax
    import jax.numpy as jnp

    if values is not None:
        return jnp.asarray(values, shape.dtype)
    return jax.random.normal(jax.random.key(0), shape.shape, shape.dtype)
