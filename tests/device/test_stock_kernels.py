"""Stock `kernels` and this library, with the same kernel: one built here there, one of the stock layout here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import MethodType

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ExpertsInterface

import tpu_kernels
from tpu_kernels import emulation
from tpu_kernels.bench import presets
from tpu_kernels.hub import find_loaded
from tpu_kernels.testing import FakeHub

pytest.importorskip("kernels")

HUB = Path(__file__).with_name("stock-hub")
REPO = "acme/ragged-dot-tpu"

ON_A_TPU = """
import sys, types
from pathlib import Path
import torch
# Stock takes a process for a TPU's by this attribute, which torch_tpu does not set.
torch.backends.tpu = types.ModuleType("torch.backends.tpu")
import kernels
from safetensors.torch import load_file, save_file
assert "tpu_kernels.hub" not in sys.modules
"""

SWAP = f"""
folder, device, inputs, output = sys.argv[1:]
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ExpertsInterface
kernel = kernels.get_kernel({REPO!r}, version=1, trust_remote_code=True)
ExpertsInterface.register("acme", kernel.experts_forward)
model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="acme", device_map=device)
with torch.no_grad():
    save_file({{"logits": model(load_file(inputs)["prompt"].to(device)).logits.cpu()}}, output)
"""


@pytest.fixture
def run_stock(tmp_path):
    """Runs a script for stock `kernels` on the device under test, in a process of its own."""

    def run(script: str, *arguments: object, **environment: str) -> None:
        (tmp_path / "script.py").write_text(ON_A_TPU + script)
        emulate = ["-m", "tpu_kernels.emulation"] if emulation.is_active() else []
        subprocess.run(
            [sys.executable, *emulate, tmp_path / "script.py", *map(str, arguments)],
            env={**os.environ, **environment},
            check=True,
            timeout=300,
        )

    return run


def test_stock_loads_a_kernel_built_here_and_computes_the_same(kernel, device, run_stock, tmp_path):
    inputs = {"0": torch.randn(9, 64), "1": torch.randn(3, 128, 64), "2": torch.tensor([2, 0, 5])}
    save_file(inputs, tmp_path / "inputs")
    script = """
folder, device, inputs, output = sys.argv[1:]
kernel = kernels.get_local_kernel(Path(folder))
tensors = [t.to(device) for _, t in sorted(load_file(inputs).items())]
save_file({"out": kernel.ragged_dot(*tensors, transpose_rhs=True).cpu()}, output)
"""
    run_stock(script, find_loaded(kernel).path.parents[1], device, tmp_path / "inputs", tmp_path / "output")
    ours = kernel.ragged_dot(*(t.to(device) for t in inputs.values()), transpose_rhs=True)
    assert torch.equal(load_file(tmp_path / "output")["out"], ours.cpu())


@pytest.fixture(scope="module")
def server():
    with FakeHub(HUB) as server:
        yield server


@pytest.fixture(scope="module")
def stock_kernel(server, device, tmp_path_factory):
    """A kernel without a `tpu` section: its ops by torch_tpu's `jax_op` under its own prefix, experts, a layer."""
    if device == "cpu":
        pytest.skip("its ops run on a TPU only: set TPU_KERNELS_EMULATE=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.url)
        patch.setenv("KERNELS_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("NO_PROXY", "*")
        return tpu_kernels.get_kernel(REPO, version=1, source="hub", trust_remote_code=["acme"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return presets.build("qwen3-moe", tmp_path_factory.mktemp("models") / "qwen3-moe")


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(5, 200, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def own(folder, prompt):
    """The logits of a model with its own experts."""
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")(prompt).logits


@pytest.fixture
def registered(stock_kernel):
    """The kernel's experts under a name that models know."""
    ExpertsInterface.register("acme", stock_kernel.experts_forward)
    yield "acme"
    ExpertsInterface._global_mapping.pop("acme")


def test_an_op_of_a_stock_kernel(stock_kernel, device):
    lhs, rhs, sizes = torch.randn(9, 64), torch.randn(3, 128, 64), [2, 0, 5]
    group_sizes = torch.tensor(sizes, dtype=torch.int32)
    out = stock_kernel.ragged_dot(lhs.to(device), rhs.to(device), group_sizes.to(device)).cpu()
    products = [rows @ matrix.T for rows, matrix in zip(lhs[:7].split(sizes), rhs, strict=True)]
    torch.testing.assert_close(out[:7], torch.cat(products), atol=1e-4, rtol=1e-4)


def test_the_experts_of_a_stock_kernel_in_a_model(registered, own, folder, prompt, device):
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation=registered, device_map=device)
    with torch.no_grad():
        assert (model(prompt.to(device)).logits.cpu() - own).abs().max() <= 1e-4


def test_the_layer_of_a_stock_kernel_in_a_model(stock_kernel, own, folder, prompt, device):
    """As stock's `kernelize` puts it there."""
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager", device_map=device)
    for layer in model.model.layers:
        layer.mlp.experts.forward = MethodType(stock_kernel.layers.Experts.forward, layer.mlp.experts)
    with torch.no_grad():
        assert (model(prompt.to(device)).logits.cpu() - own).abs().max() <= 1e-4


def test_stock_loads_that_kernel_from_the_same_hub(
    stock_kernel, server, own, folder, prompt, device, run_stock, tmp_path
):
    save_file({"prompt": prompt}, tmp_path / "inputs")
    environment = server.environment(tmp_path / "stock")
    run_stock(SWAP, folder, device, tmp_path / "inputs", tmp_path / "output", **environment)
    assert (load_file(tmp_path / "output")["logits"] - own).abs().max() <= 1e-4
