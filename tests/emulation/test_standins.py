"""Ops that need help on the emulated device give what they give on the CPU: eager, compiled, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tpu_kernels import emulation

if not emulation.is_active():
    pytest.skip("needs TPU_KERNELS_EMULATE=1", allow_module_level=True)

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from torch import Tensor

pytestmark = pytest.mark.device

modes = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def check(
    function: Callable[..., Tensor],
    *inputs: Tensor,
    compiled: bool,
    reference: Callable[..., Tensor] | None = None,
) -> None:
    """The result of `function` on the device, and its gradients, are those of `reference` on the CPU."""
    here, there = (
        [x.detach().to(device).requires_grad_(x.is_floating_point()) for x in inputs]
        for device in ("cpu", "tpu")
    )
    expected = (reference or function)(*here)
    if compiled:
        torch.compiler.reset()
        function = torch.compile(function, backend="tpu", fullgraph=True)
    actual = function(*there)
    error = 2e-2 if expected.dtype == torch.bfloat16 else 1e-4
    tolerance = {"rtol": error, "atol": error}
    torch.testing.assert_close(actual.detach().cpu(), expected, **tolerance)
    if expected.requires_grad:
        weights = torch.randn_like(expected)
        expected.backward(weights)
        actual.backward(weights.to("tpu"))
        for x, y in zip(there, here, strict=True):
            if y.grad is not None:
                torch.testing.assert_close(x.grad.cpu(), y.grad, **tolerance)


@modes
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float32])
def test_cumsum(dtype: torch.dtype, dim: int, compiled: bool) -> None:
    check(lambda x: x.cumsum(dim), (100 * torch.randn(9, 35)).to(dtype), compiled=compiled)


@modes
@pytest.mark.parametrize("op", ["cumprod", "logcumsumexp"])
def test_other_scans(op: str, compiled: bool) -> None:
    check(lambda x: getattr(x, op)(1), torch.rand(3, 20) + 0.5, compiled=compiled)


def grouped_mm_in_a_loop(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Group by group, as the documentation has it; zeros past the last offset."""
    spans = [slice(start, end) for start, end in zip([0, *offs[:-1]], offs, strict=True)]
    if a.dim() == 2 and b.dim() == 2:
        return torch.stack([a[:, s] @ b[s] for s in spans])
    if b.dim() == 2:
        products = [a[g] @ b[:, s] for g, s in enumerate(spans)]
        return F.pad(torch.cat(products, 1), (0, b.shape[1] - int(offs[-1])))
    products = [a[s] @ b[g] for g, s in enumerate(spans)]
    return F.pad(torch.cat(products), (0, 0, 0, a.shape[0] - int(offs[-1])))


@modes
@pytest.mark.parametrize("offsets", [[3, 7, 12], [0, 5, 5], [0, 0, 0]])
@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [((12, 8), (3, 8, 16)), ((3, 4, 8), (8, 12)), ((4, 12), (12, 8))],
    ids=["rows", "columns", "contracted"],
)
def test_grouped_mm(
    a_shape: tuple[int, ...], b_shape: tuple[int, ...], offsets: list[int], compiled: bool
) -> None:
    offs = torch.tensor(offsets, dtype=torch.int32)
    check(
        lambda a, b, offs: F.grouped_mm(a, b, offs=offs),
        torch.randn(a_shape),
        torch.randn(b_shape),
        offs,
        compiled=compiled,
        reference=grouped_mm_in_a_loop,
    )


@modes
def test_grouped_mm_in_equal_batches(compiled: bool) -> None:
    check(F.grouped_mm, torch.randn(3, 4, 8), torch.randn(3, 8, 16), compiled=compiled, reference=torch.bmm)


@modes
def test_grouped_mm_as_transformers_calls_it(compiled: bool) -> None:
    """In bfloat16, with a transposed weight, and garbage past the last offset that must not spread."""
    a = torch.randn(12, 8, dtype=torch.bfloat16)
    a[10:] = torch.nan
    weight = torch.randn(3, 16, 8, dtype=torch.bfloat16)
    offs = torch.tensor([4, 4, 10], dtype=torch.int32)

    def function(a: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        return F.grouped_mm(a, weight.transpose(-2, -1), offs=offs)

    def reference(a: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        return grouped_mm_in_a_loop(a, weight.transpose(-2, -1), offs)

    check(function, a, weight, offs, compiled=compiled, reference=reference)


@modes
@pytest.mark.parametrize("options", [{"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}], ids=str)
def test_attention(options: dict[str, Any], compiled: bool) -> None:
    keys, values = torch.randn(2, 2, 2 if "enable_gqa" in options else 4, 7, 16)
    check(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options),
        torch.randn(2, 4, 5, 16),
        keys,
        values,
        compiled=compiled,
    )


@modes
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_attention_with_a_mask(dtype: torch.dtype, compiled: bool) -> None:
    mask = torch.randn(2, 1, 5, 7) if dtype.is_floating_point else torch.rand(2, 1, 5, 7) > 0.4
    queries = torch.randn(2, 4, 5, 16)
    keys, values = torch.randn(2, 2, 4, 7, 16)
    check(F.scaled_dot_product_attention, queries, keys, values, mask, compiled=compiled)


@pytest.mark.parametrize("op", [torch.unique, torch.unique_consecutive])
def test_unique(op: Callable[..., tuple[Tensor, ...]]) -> None:
    x = torch.randint(9, (500,))
    here, there = (op(x.to(device), return_inverse=True, return_counts=True) for device in ("cpu", "tpu"))
    for actual, expected in zip(there, here, strict=True):
        torch.testing.assert_close(actual.cpu(), expected)


def test_ahead_of_time_compilation() -> None:
    def function(x: Tensor) -> Tensor:
        return x.exp() + 1

    x = torch.randn(4, device="tpu")
    ahead = torch.compile(function, backend="tpu", fullgraph=True).aot_compile(((x,), {}))
    torch.testing.assert_close(ahead(x).cpu(), function(x.cpu()))


@pytest.mark.parametrize("interpret", [True, False], ids=["interpreted", "as-for-a-tpu"])
def test_pallas_pipeline_through_torch(interpret: bool) -> None:
    def double(x_ref: jax.Array, o_ref: jax.Array) -> None:
        o_ref[...] = x_ref[...] * 2

    def kernel(x_hbm: jax.Array, o_hbm: jax.Array) -> None:
        spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
        pltpu.emit_pipeline(double, grid=(2,), in_specs=[spec], out_specs=[spec])(x_hbm, o_hbm)

    def call(x: jax.Array) -> jax.Array:
        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        shape = jax.ShapeDtypeStruct((16, 128), jnp.float32)
        return pl.pallas_call(kernel, shape, in_specs=[anywhere], out_specs=anywhere, interpret=interpret)(x)

    op = torch.tpu.pallas.jax_op(f"emulation_tests::double_{interpret}", call)
    x = torch.randn(16, 128)
    torch.testing.assert_close(op(x.to("tpu")).cpu(), 2 * x)
