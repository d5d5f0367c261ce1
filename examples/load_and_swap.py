"""The main job in one file: load a kernel, use its op, switch a model's experts to it.

On a TPU: `python examples/load_and_swap.py`. Without one: `tpu-kernels emulate examples/load_and_swap.py`.
"""

import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tpu_kernels
from tpu_kernels.bench import presets

# 1. Load. The name people know is an alias of the kernel that ships with the package: no network is needed.
print(tpu_kernels.explain("kernels-community/ragged-dot", version=1))
kernel = tpu_kernels.get_kernel("kernels-community/ragged-dot", version=1)

# 2. Use. Rows sorted by group, a weight matrix a group, stored as transformers stores experts: [G, N, K].
lhs = torch.randn(6, 64, device="tpu")
rhs = torch.randn(3, 128, 64, device="tpu", requires_grad=True)
sizes = torch.tensor([2, 0, 3], device="tpu")  # the last row is in no group
out = kernel.ragged_dot(lhs, rhs, sizes, transpose_rhs=True)
out.sum().backward()
print(
    f"\n{kernel.ragged_dot.name}: {tuple(out.shape)}, rows past the groups {out[-1].detach().abs().max().item()}"
)
print("paths that ran:", dict(kernel.ragged_dot.paths))

# 3. Swap. A small Mixtral with random weights, built here; any mixture-of-experts model works like this.
with tempfile.TemporaryDirectory() as folder:
    presets.build("mixtral", folder)
    model = AutoModelForCausalLM.from_pretrained(folder, device_map="tpu")
    tokenizer = AutoTokenizer.from_pretrained(folder)
inputs = tokenizer("The river has two names", return_tensors="pt")
arguments = {"max_new_tokens": 16, "do_sample": False, "cache_implementation": "static"}
before = model.generate(**inputs, **arguments)
print(f"\n{tpu_kernels.enable(model)}")
after = model.generate(**inputs, **arguments)
print("same tokens as before:", torch.equal(before, after))
