"""Kernels that register torch ops under a fixed name do not change each other: the second one is refused."""

from __future__ import annotations

import pytest

import tpu_kernels
from tpu_kernels.errors import IncompatibleKernelError

from .conftest import Publish, RunPython, Serve

torch = pytest.importorskip("torch")

REPO = "tpu-kernels/fixed"
CUSTOM_OP = """
import torch
@torch.library.custom_op("{namespace}::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    return x * {factor}
"""
LIBRARY = """
import torch
library = torch.library.Library("{namespace}", "FRAGMENT")
library.define("scale(Tensor x) -> Tensor")
library.impl("scale", lambda x: x * {factor}, "CompositeExplicitAutograd")
scale = torch.ops.{namespace}.scale
"""
JAX_OP = """
import torch, jax
from torch_tpu._internal.pallas import jax_op
@jax_op("{namespace}::scale")
def scale(x: jax.Array) -> jax.Array:
    return x * {factor}
"""
SWALLOWED = (
    "try:\n"
    + "".join(f"    {line}\n" for line in CUSTOM_OP.strip().splitlines())
    + "except Exception:\n    pass\n"
)


@pytest.mark.parametrize(
    ("name", "template"), [("custom_op", CUSTOM_OP), ("library", LIBRARY), ("swallowed", SWALLOWED)]
)
def test_a_second_version_is_refused_and_the_first_is_what_it_was(
    publish: Publish, serve: Serve, name: str, template: str
) -> None:
    namespace = f"fixed_{name}"
    for version in (1, 2):
        publish(REPO, template.format(namespace=namespace, factor=version), version=version)
    serve()
    first = tpu_kernels.get_kernel(REPO, version=1)
    [loaded] = [kernel for kernel in tpu_kernels.get_loaded_kernels() if kernel.module is first]
    with pytest.raises(IncompatibleKernelError) as raised:
        tpu_kernels.get_kernel(REPO, version=2)
    message = str(raised.value)
    assert (
        f"registers the torch op {namespace}::scale, which the kernel with the id {loaded.id!r} has"
        in message
    )
    assert "Load it in another process" in message
    assert first.scale(torch.ones(1)).item() == 1
    assert getattr(torch.ops, namespace).scale(torch.ones(1)).item() == 1
    assert tpu_kernels.get_kernel(REPO, version=1) is first


def test_the_op_of_somebody_else_is_not_replaced_either(publish: Publish, serve: Serve) -> None:
    @torch.library.custom_op("fixed_mine::scale", mutates_args=())
    def mine(x: torch.Tensor) -> torch.Tensor:
        return x * 7

    publish(REPO, CUSTOM_OP.format(namespace="fixed_mine", factor=1))
    serve()
    with pytest.raises(IncompatibleKernelError, match="which something else in this process has registered"):
        tpu_kernels.get_kernel(REPO, version=1)
    assert mine(torch.ones(1)).item() == 7


def test_an_implementation_for_the_op_of_another_kernel_is_refused(publish: Publish, serve: Serve) -> None:
    publish(REPO, CUSTOM_OP.format(namespace="fixed_base", factor=1))
    takeover = 'import torch\nl = torch.library.Library("fixed_base", "IMPL")\nl.impl("scale", lambda x: x * 9, "CPU")'
    publish("tpu-kernels/takeover", takeover)
    serve()
    first = tpu_kernels.get_kernel(REPO, version=1)
    with pytest.raises(IncompatibleKernelError, match="fixed_base::scale"):
        tpu_kernels.get_kernel("tpu-kernels/takeover", version=1)
    assert first.scale(torch.ones(1)).item() == 1


def test_ops_named_after_the_id_live_side_by_side(publish: Publish, serve: Serve) -> None:
    code = CUSTOM_OP.replace('"{namespace}::scale"', 'f"{{__name__}}::scale"')
    for version in (1, 2):
        publish(REPO, code.format(factor=version), version=version)
    serve()
    kernels = [tpu_kernels.get_kernel(REPO, version=version) for version in (1, 2)]
    assert [kernel.scale(torch.ones(1)).item() for kernel in kernels] == [1, 2]


def test_a_failed_import_takes_its_ops_back(
    publish: Publish, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = "\nimport os\nif 'KERNEL_FAILS' in os.environ:\n    raise RuntimeError('not ready')"
    publish(REPO, CUSTOM_OP.format(namespace="fixed_retry", factor=3) + fails)
    serve()
    monkeypatch.setenv("KERNEL_FAILS", "1")
    with pytest.raises(RuntimeError, match="not ready"):
        tpu_kernels.get_kernel(REPO, version=1)
    assert not hasattr(torch.ops.fixed_retry, "scale")
    monkeypatch.delenv("KERNEL_FAILS")
    assert tpu_kernels.get_kernel(REPO, version=1).scale(torch.ones(1)).item() == 3
    define = torch.library.Library.define
    assert not hasattr(define, "__wrapped__")


def test_a_kernel_that_brings_torch_with_it_can_be_tried_again(
    publish: Publish, serve: Serve, run_python: RunPython
) -> None:
    code = CUSTOM_OP.replace('"{namespace}::scale"', 'f"{{__name__}}::scale"').format(factor=3)
    publish(REPO, f"{code}\nimport os\nif 'KERNEL_FAILS' in os.environ:\n    raise RuntimeError('not ready')")
    script = f"""
import os, tpu_kernels
os.environ["KERNEL_FAILS"] = "1"
try:
    tpu_kernels.get_kernel({REPO!r}, version=1)
except RuntimeError as error:
    assert str(error) == "not ready"
del os.environ["KERNEL_FAILS"]
import torch
assert tpu_kernels.get_kernel({REPO!r}, version=1).scale(torch.ones(1)).item() == 3
"""
    run_python(script, serve())


def test_an_op_of_torch_tpu_is_watched_too(publish: Publish, serve: Serve) -> None:
    pytest.importorskip("torch_tpu")
    for version in (1, 2):
        publish(REPO, JAX_OP.format(namespace="fixed_jax", factor=version), version=version)
    serve()
    tpu_kernels.get_kernel(REPO, version=1)
    with pytest.raises(IncompatibleKernelError, match="fixed_jax::scale"):
        tpu_kernels.get_kernel(REPO, version=2)
