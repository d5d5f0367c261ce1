"""`ops.op`: what one declaration gives, on the device that is there (the CPU, a TPU, an emulated one)."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import pytest
import torch
from torch._subclasses import FakeTensorMode

from tpu_kernels import ops
from tpu_kernels.errors import TpuKernelsError
from tpu_kernels.ops import tpu

traced: list[str] = []


def _scaled(x, y, *, scale, twice, offset=None, tpu=None, interpret=False):
    traced.append("jax")
    out = (x @ y) * scale * (2 if twice else 1)
    return out if offset is None else out + offset


def _counted(index):
    return (index + 1).sum(axis=0)


@pytest.fixture(scope="module")
def scaled():
    @ops.op(kernel=_scaled, reference=_scaled, differentiable=["x", "y"], cost=_cost, cases=("a case",))
    def scaled(
        x: torch.Tensor,
        y: torch.Tensor,
        *,
        scale: float = 1.0,
        twice: bool = False,
        offset: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Scaled product."""
        if x.shape[1] != y.shape[0]:
            raise ops.InputError(f"x has {x.shape[1]} columns but y has {y.shape[0]} rows")
        return x.new_empty((x.shape[0], y.shape[1]))

    return scaled


def _cost(x, y, **_):
    return ops.Cost(flops=2 * x.shape[0] * x.shape[1] * y.shape[1], bytes=0)


@pytest.fixture
def operands(device):
    return [torch.randn(s).to(device).requires_grad_() for s in ((4, 5), (5, 3))]


def test_a_tensor_by_keyword_has_a_fake(scaled):
    x, y, offset = (torch.empty(shape, device="meta") for shape in ((4, 5), (5, 3), (3,)))
    assert scaled(x, y, offset=offset).shape == (4, 3)


def test_static_arguments_and_optional_tensors_specialise(scaled, operands, device):
    x, y = operands
    offset = torch.randn(3).to(device)
    torch.testing.assert_close(scaled(x, y), x @ y)
    torch.testing.assert_close(scaled(x, y, scale=3.0), x @ y * 3)
    torch.testing.assert_close(scaled(x, y, scale=3.0, twice=True), x @ y * 6)
    torch.testing.assert_close(scaled(x, y, offset=offset), x @ y + offset)


def test_one_program_serves_calls_that_agree(scaled, device):
    x, y = torch.randn(7, 7).to(device), torch.randn(7, 7).to(device)
    scaled(x, y, scale=0.5)
    before = len(traced)
    scaled(y, x, scale=0.5)
    assert len(traced) == before


def test_a_program_has_one_key_wherever_it_is_traced_from():
    def export():
        shape = jax.ShapeDtypeStruct((3,), jnp.float32)
        return jax.export.export(jax.jit(lambda x: 2 * x), platforms=["tpu"])(shape)

    here, there = export(), (lambda: export())()
    assert tpu._fingerprint(here) == tpu._fingerprint(there)


def test_views_are_read_as_what_they_show(scaled, device):
    x, y = torch.randn(6, 8).to(device), torch.randn(10, 9).to(device)
    torch.testing.assert_close(scaled(x.t()[:5, ::2], y[::4, 1:]), x.t()[:5, ::2] @ y[::4, 1:])


def test_inference_mode(scaled, operands):
    x, y = operands
    with torch.inference_mode():
        assert scaled(x, y).is_inference()


@pytest.mark.parametrize("frozen", [None, "x", "y"])
def test_gradients_eager_and_compiled(scaled, operands, backend, frozen):
    def run(function):
        x, y = (t.detach().clone().requires_grad_() for t in operands)
        if frozen:
            {"x": x, "y": y}[frozen].requires_grad_(False)
        function(x, y).sin().sum().backward()
        return x.grad, y.grad

    expected = run(lambda x, y: x @ y * 3)
    eager = run(lambda x, y: scaled(x, y, scale=3.0))
    compiled = run(torch.compile(lambda x, y: scaled(x, y, scale=3.0), backend=backend, fullgraph=True))
    for actual in (eager, compiled):
        torch.testing.assert_close(actual, expected)


def test_an_op_without_static_arguments_has_a_gradient(device):
    def kernel(x, tpu=None, interpret=False):
        return 3 * x

    @ops.op(kernel=kernel, reference=kernel, differentiable=["x"])
    def tripled(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    x = torch.ones(4).to(device).requires_grad_()
    tripled(x).sum().backward()
    assert x.grad.tolist() == [3.0] * 4


def test_second_derivative_is_refused(scaled, operands):
    x, y = operands
    (grad,) = torch.autograd.grad(scaled(x, y).sin().sum(), x, create_graph=True)
    with pytest.raises(TpuKernelsError, match="no second derivative"):
        grad.sum().backward()


def test_fake_tensors_need_no_tracing(scaled):
    before = len(traced)
    with FakeTensorMode():
        out = scaled(torch.empty(9, 2), torch.empty(2, 4))
    assert out.shape == (9, 4)
    assert len(traced) == before


def test_wide_integers_are_narrowed(device):
    @ops.op(kernel=lambda index, tpu, interpret: _counted(index), reference=_counted)
    def counted(index: torch.Tensor) -> torch.Tensor:
        return index.new_empty(index.shape[1:], dtype=torch.int32)

    index = torch.tensor([[1, 2], [3, 4]], device=device)
    assert counted(index).tolist() == [6, 8]


def test_opcheck(scaled, operands, device):
    # torch has no registration check for this device yet; the gradients are tested above.
    skipped = {"test_autograd_registration"} if device == "tpu" else set()
    checks = [
        check
        for check in (
            "test_schema",
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_dynamic",
        )
        if check not in skipped
    ]
    torch.library.opcheck(scaled._overload, tuple(operands), {"scale": 2.0}, test_utils=checks)


def test_refused_before_anything_is_traced(scaled, operands):
    before = len(traced)
    with pytest.raises(ops.InputError, match="x has 5 columns but y has 4 rows"):
        scaled(operands[0], operands[0])
    assert len(traced) == before


def test_several_devices_are_refused(scaled, device):
    if device == "cpu":
        pytest.skip("there is one device only")
    with pytest.raises(ops.InputError, match=r"x on tpu:0, y on cpu"):
        scaled(torch.ones(2, 2, device="tpu"), torch.ones(2, 2))


def test_an_op_carries_its_parts(scaled):
    assert scaled.jax_fn is _scaled
    assert scaled.reference is _scaled
    assert scaled.cases == ("a case",)
    assert scaled.cost(torch.empty(2, 3), torch.empty(3, 4)).flops == 48
    assert scaled.__doc__ == "Scaled product."


def test_same_name_declared_twice_is_two_ops(device):
    def declare(factor):
        @ops.op(kernel=lambda x, tpu, interpret: x * factor, reference=lambda x: x * factor)
        def times(x: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(x)

        return times

    twice, thrice = declare(2), declare(3)
    x = torch.ones(1, device=device)
    assert (twice(x).item(), thrice(x).item()) == (2, 3)
    assert twice.name != thrice.name


def test_paths_tell_what_ran(scaled, operands, device):
    scaled(*operands)
    assert set(scaled.paths) == {"cpu" if device == "cpu" else _tpu_path()}


def _tpu_path() -> str:
    return "interpreted" if ops.current_target().emulated else "kernel"


def test_kernel_that_cannot_be_interpreted_falls_back_to_its_reference(device, caplog):
    if device == "cpu" or not ops.current_target().emulated:
        pytest.skip("on the emulated device only")

    def kernel(x, *, tpu, interpret):
        raise NotImplementedError("dynamic copies")

    @ops.op(kernel=kernel, reference=lambda x: x + 1)
    def stubborn(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    with caplog.at_level("WARNING"):
        assert stubborn(torch.ones(1, device=device)).item() == 2
    assert stubborn.paths == {"reference": 1}
    assert "dynamic copies" in caplog.text


def test_without_direct_kernel_calls_the_public_api_serves(monkeypatch, device, caplog):
    if device == "cpu":
        pytest.skip("the CPU path has no torch_tpu in it")
    monkeypatch.setattr(tpu, "_direct_calls", lambda: None)

    @ops.op(kernel=lambda x, y, tpu, interpret: (x + y, x - y), reference=lambda x, y: (x + y, x - y))
    def sum_and_difference(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(x), torch.empty_like(y)

    with caplog.at_level("WARNING"):
        plus, minus = sum_and_difference(torch.ones(2, device=device), torch.ones(2, device=device))
    assert plus.tolist() == [2, 2]
    assert minus.tolist() == [0, 0]
    assert "jax_op" in caplog.text
