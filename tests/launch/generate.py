"""Run by each rank: greedy tokens of models whose experts are spread over the ranks. FOLDER... RESULT"""

import os
import sys

import torch
from transformers import AutoModelForCausalLM

import tpu_kernels

*folders, result = sys.argv[1:]
tpu_kernels.enable()
tokens = {}
for folder in folders:
    config = tpu_kernels.distributed_config(folder, f"ep{os.environ['WORLD_SIZE']}")
    model = AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation="tpu_fused_experts", distributed_config=config
    ).eval()
    prompt = torch.arange(5, 21).view(2, 8)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    tokens[folder] = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    [experts, *_] = (m for m in model.modules() if hasattr(m, "_is_expert_parallel"))
    assert experts._is_expert_parallel
torch.save(tokens, f"{result}.{os.environ['RANK']}")
