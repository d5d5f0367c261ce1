"""Expert parallelism over processes: the ranks' results add up to those of the model's own code on all experts."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import tpu_kernels
from tpu_kernels.integrations.transformers import EXPERTS

EXPERTS_OF_ALL = 8
MODELS = {
    "qwen3-moe": (
        transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts,
        {"num_experts": EXPERTS_OF_ALL, "hidden_size": 64, "moe_intermediate_size": 32, "hidden_act": "silu"},
    ),
    "gpt-oss": (
        transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts,
        {
            "num_local_experts": EXPERTS_OF_ALL,
            "hidden_size": 64,
            "intermediate_size": 32,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
    ),
}


def experts_of(model: str) -> torch.nn.Module:
    torch.manual_seed(0)
    kind, config = MODELS[model]
    experts = kind(SimpleNamespace(**config, _experts_implementation=EXPERTS))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return experts.eval()


def run_rank(rank: int, ranks: int, model: str, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    tpu_kernels.enable()
    whole = experts_of(model)
    whole.config._experts_implementation = "eager"
    hidden, index = torch.randn(9, 64), torch.stack([torch.randperm(EXPERTS_OF_ALL)[:2] for _ in range(9)])
    index[:3] = torch.tensor([0, 1])  # all of the first rank
    weights = torch.rand(9, 2)

    own = experts_of(model)
    share = EXPERTS_OF_ALL // ranks
    for name, parameter in own.named_parameters():
        setattr(own, name, torch.nn.Parameter(parameter[rank * share : (rank + 1) * share].clone()))
    own.num_experts, own._is_expert_parallel = share, True
    here = (index >= rank * share) & (index < (rank + 1) * share)
    forward = ALL_EXPERTS_FUNCTIONS[EXPERTS]
    with torch.no_grad():
        part = forward(own, hidden, (index - rank * share).masked_fill(~here, share), weights * here)
        torch.distributed.all_reduce(part)
        torch.save((part, whole(hidden, index, weights)), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", MODELS)
def test_ranks_add_up_to_one_process(model, ranks, tmp_path, device):
    if device != "cpu":
        pytest.skip("gloo ranks compute on the CPU; the emulated device has one process")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run_rank, (ranks, model, port, str(tmp_path)), nprocs=ranks)
    for rank in range(ranks):
        part, whole = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(part, whole, atol=1e-5, rtol=1e-5)
        assert whole.norm() > 1
