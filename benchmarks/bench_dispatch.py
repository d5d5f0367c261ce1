"""Host time of one eager call: this library's ops beside torch_tpu's public way and a built-in op.

    TPU_KERNELS_EMULATE=1 pytest benchmarks/bench_dispatch.py

The factors in brackets are what holds on other machines: the absolute times are this host's. Only enqueueing is
timed, in streams of a few calls. The device is drained between streams, since calls would else wait for it; and not
between calls, since the first one after a drain wakes the runtime's thread, which costs more than any dispatch. On
an emulated device the minimum is the cleaner column: the device computes on the same cores, and medians are bimodal.
"""

from __future__ import annotations

import itertools
import warnings

import jax
import pytest
import torch

from tpu_kernels import ops

STREAM = 4


def _product(x, y, scale, tpu, interpret):
    return (x @ y) * scale


@ops.op(kernel=_product, reference=lambda x, y, scale: (x @ y) * scale, differentiable=["x", "y"])
def ours(x: torch.Tensor, y: torch.Tensor, *, scale: float) -> torch.Tensor:
    """A scaled product, by this library."""
    return x.new_empty((x.shape[0], y.shape[1]))


def _public():
    def product(x: jax.Array, y: jax.Array, scale: float) -> jax.Array:
        return (x @ y) * scale

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.tpu.pallas.jax_op("bench_dispatch::product", product)


@pytest.fixture(scope="module")
def calls():
    x, y = (torch.randn(8, 8).to("tpu") for _ in range(2))
    return {
        "tpu_kernels": (ours, (x, y), {"scale": 2.0}),
        "torch.tpu.pallas.jax_op": (_public(), (x, y, 2.0), {}),
        "aten.add": (torch.add, (x, y), {}),
    }


@pytest.mark.parametrize("no_grad", [False, True], ids=["grad-mode", "no-grad"])
@pytest.mark.parametrize("name", ["tpu_kernels", "torch.tpu.pallas.jax_op", "aten.add"])
def test_dispatch(benchmark, calls, name, no_grad):
    function, args, kwargs = calls[name]
    benchmark.group = f"one eager call, {'no-grad' if no_grad else 'grad-mode'}"
    rounds = itertools.count()

    def drain():
        if next(rounds) % STREAM == 0:
            torch.accelerator.synchronize()
        return args, kwargs

    with torch.set_grad_enabled(not no_grad):
        function(*args, **kwargs)
        benchmark.pedantic(function, setup=drain, rounds=4000, warmup_rounds=STREAM)
