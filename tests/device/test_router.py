"""The shipped router kernel beside transformers' own routers, on the device that is there."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

import tpu_kernels
from tpu_kernels.errors import TpuKernelsError

T, E, K = 9, 64, 6
SIZES = {"hidden_size": E, "num_experts_per_tok": K}
V3 = {"n_group": 8, "topk_group": 3, "routed_scaling_factor": 2.5}
V2 = {"n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0}
ROUTERS = {
    "qwen3": (Qwen3MoeTopKRouter, Qwen3MoeConfig(num_experts=E, norm_topk_prob=True, **SIZES), {}),
    "qwen3-unnormalised": (
        Qwen3MoeTopKRouter,
        Qwen3MoeConfig(num_experts=E, norm_topk_prob=False, **SIZES),
        {"norm_topk_prob": False},
    ),
    "mixtral": (MixtralTopKRouter, MixtralConfig(num_local_experts=E, **SIZES), {}),
    "deepseek-v3": (
        DeepseekV3TopkRouter,
        DeepseekV3Config(n_routed_experts=E, norm_topk_prob=True, **V3, **SIZES),
        {"scoring_func": "sigmoid", **V3},
    ),
    "deepseek-v2": (
        DeepseekV2TopkRouter,
        DeepseekV2Config(n_routed_experts=E, topk_method="group_limited_greedy", **V2, **SIZES),
        {"norm_topk_prob": False, "group_top": 1, **V2},
    ),
}


@pytest.fixture(scope="module")
def kernel():
    return tpu_kernels.get_kernel("tpu-kernels/router", version=1)


@pytest.fixture(params=ROUTERS)
def case(request):
    """A router whose logits are its input, and what the kernel has to be told."""
    own, config, static = ROUTERS[request.param]
    router = own(config)
    bias = None
    with torch.no_grad():
        router.weight.copy_(torch.eye(E))
        if hasattr(router, "e_score_correction_bias"):
            bias = router.e_score_correction_bias.copy_(torch.randint(0, 3, (E,)) / 4)
    return router, bias, {"top_k": K, **static}


def _stable_topk(values, k, dim=-1, largest=True, sorted=True):
    found = torch.sort(values, dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((found.values[..., :k], found.indices[..., :k]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_and_weights_are_those_of_transformers(kernel, device, case, dtype):
    router, bias, static = case
    logits = torch.randn(T, E)
    if dtype == torch.bfloat16:  # none of a row equal, as in float32
        logits = torch.stack([torch.randperm(E) for _ in range(T)]) / 8 - 4
    _, weights, index = router.to(dtype)(logits.to(dtype))
    given = [logits.to(dtype).to(device), *([] if bias is None else [bias.float().to(device)])]
    found_weights, found_index = (each.cpu() for each in kernel.route(*given, **static))
    # DeepSeek does not ask for an order.
    found_index, order = found_index.long().sort(-1)
    index, own_order = index.sort(-1)
    assert torch.equal(found_index, index)
    torch.testing.assert_close(found_weights.gather(1, order).to(weights.dtype), weights.gather(1, own_order))


def test_ties_are_broken_as_torch_breaks_them_on_a_tpu(kernel, device, case, monkeypatch):
    """By the lowest index. On a CPU it leaves them to a partial sort, and is given a stable one here."""
    router, bias, static = case
    if device == "cpu":
        monkeypatch.setattr(torch, "topk", _stable_topk)
        monkeypatch.setattr(torch.Tensor, "topk", _stable_topk)
    logits = torch.randint(0, 3, (T, E)).float().to(device)
    given = [logits, *([] if bias is None else [bias.to(device)])]
    weights, index = kernel.route(*given, **static)
    with torch.no_grad():
        _, own_weights, own_index = router.to(device)(logits)
    assert torch.equal(index.cpu().long(), own_index.cpu())
    torch.testing.assert_close(weights.cpu(), own_weights.cpu())


def test_torch_on_a_cpu_breaks_ties_by_the_lowest_index_for_one_of_many_only():
    equal = torch.zeros(1, 64)
    assert equal.topk(1).indices.item() == 0
    assert set(equal.topk(6).indices.flatten().tolist()) != set(range(6))


def test_gradient_is_that_of_transformers(kernel, device, case):
    router, bias, static = case
    logits, factor = torch.randn(T, E), torch.randn(T, E)
    grads = []
    for place in ("cpu", device):
        given = logits.clone().to(place).requires_grad_()
        if not grads:
            _, weights, index = router(given)
        else:
            weights, index = kernel.route(given, *([] if bias is None else [bias.to(place)]), **static)
        (weights * factor.to(place).gather(1, index.long())).sum().backward()
        grads.append(given.grad.cpu())
    torch.testing.assert_close(*grads)


def test_compiles_to_one_graph(kernel, device, backend):
    logits = torch.randn(T, E, device=device)

    def layer(logits):
        weights, index = kernel.route(logits * 2, top_k=K)
        return weights * 2, index

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(logits), layer(logits))
    assert kernel.route.paths["reference"] == 0  # interpreted on the emulated device


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.ones(E)}, r"logits has shape \(64,\); it must be \[T, E\]"),
        ({"logits": torch.ones(2, 513)}, "E from 1 to 512"),
        ({"logits": torch.ones(2, E).half()}, "logits has dtype torch.float16"),
        ({"correction_bias": torch.ones(1)}, r"correction_bias has shape \(1,\).*must be \[64\]"),
        ({"top_k": 17}, "top_k is 17; it must be from 1 to 16"),
        ({"top_k": 9, "n_group": 8}, "of 8 experts that may be chosen"),
        ({"n_group": 3}, "n_group is 3; it must divide the 64 experts"),
        ({"n_group": 4, "topk_group": 5}, "topk_group is 5; it must be from 1 to n_group, 4"),
        ({"n_group": 32, "group_top": 3}, "group_top is 3; it must be from 1 to the 2 experts"),
        ({"scoring_func": "relu"}, "scoring_func is 'relu'"),
    ],
)
def test_a_bad_call_says_what_is_wrong(kernel, device, changes, message):
    arguments = {"logits": torch.ones(2, E), "top_k": 2, **changes}
    placed = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    with pytest.raises(TpuKernelsError, match=message):
        kernel.route(**placed)
