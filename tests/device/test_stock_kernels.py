"""The shipped artifact in stock `kernels`: it loads there, and computes the same."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tpu_kernels import emulation
from tpu_kernels.hub import find_loaded

pytest.importorskip("kernels")

SCRIPT = """
import sys, types
from pathlib import Path
import torch
folder, device, inputs, output = sys.argv[1:]
# Stock takes a process for a TPU's by this attribute, which torch_tpu does not set.
torch.backends.tpu = types.ModuleType("torch.backends.tpu")
import kernels
kernel = kernels.get_local_kernel(Path(folder))
assert "tpu_kernels.hub" not in sys.modules
from safetensors.torch import load_file, save_file
tensors = [t.to(device) for _, t in sorted(load_file(inputs).items())]
save_file({"out": kernel.ragged_dot(*tensors, transpose_rhs=True).cpu()}, output)
"""


def test_stock_kernels_loads_the_artifact_and_computes_the_same(kernel, device, tmp_path):
    from safetensors.torch import load_file, save_file

    inputs = {"0": torch.randn(9, 64), "1": torch.randn(3, 128, 64), "2": torch.tensor([2, 0, 5])}
    save_file(inputs, tmp_path / "inputs")
    (tmp_path / "script.py").write_text(SCRIPT)
    variant = find_loaded(kernel).path
    arguments = [variant.parents[1], device, tmp_path / "inputs", tmp_path / "output"]
    emulate = ["-m", "tpu_kernels.emulation"] if emulation.is_active() else []
    subprocess.run([sys.executable, *emulate, tmp_path / "script.py", *arguments], check=True, timeout=300)
    ours = kernel.ragged_dot(*(t.to(device) for t in inputs.values()), transpose_rhs=True)
    assert torch.equal(load_file(tmp_path / "output")["out"], ours.cpu())
