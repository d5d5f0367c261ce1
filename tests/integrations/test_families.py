"""Whole models of six families: the kernel's logits and tokens against the model's own, eager, on the CPU."""

from __future__ import annotations

import pytest
import torch
import transformers

import tpu_kernels
from tpu_kernels.bench.presets import PRESETS


def load(folder, **kwargs):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", **kwargs
    ).eval()


def greedy(model, prompt, tokens):
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        cache_implementation="static",
    ).cpu()


@pytest.fixture(params=sorted(PRESETS))
def family(request):
    return request.param


@pytest.mark.parametrize("count", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_logits_and_greedy_tokens_are_those_of_the_model(family, folder, device, count):
    torch.manual_seed(0)
    prompt = torch.randint(5, 200, (2, 12))
    own = load(folder(family), experts_implementation="eager")
    model = load(folder(family), device_map=device)

    report = tpu_kernels.enable(model)

    assert {m.path for m in report.modules} == {"fused"}
    assert all(m.active for m in report.modules)
    with torch.no_grad():
        assert (model(prompt.to(device)).logits.cpu() - own(prompt).logits).abs().max() <= 1e-4
    # Models with sliding windows compile a graph a step up to this limit; two tell as much as eight.
    with torch._dynamo.config.patch(recompile_limit=2):
        tokens = greedy(model, prompt, count)
    assert torch.equal(tokens, greedy(own, prompt, count))
    assert len(set(tokens[0, 12:].tolist())) > 3, "a constant output proves nothing"


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_training_step_and_full_graph(family, folder, device, backend):
    """Gradients, eagerly and in one graph."""
    torch.manual_seed(0)
    prompt = torch.randint(5, 200, (2, 9))

    def gradients(model, forward, prompt):
        model.zero_grad()
        forward(input_ids=prompt, labels=prompt, use_cache=False).loss.backward()
        return {name: p.grad.cpu().clone() for name, p in model.named_parameters()}

    own = load(folder(family), experts_implementation="eager")
    expected = gradients(own, own, prompt)
    model = load(folder(family), device_map=device)
    tpu_kernels.enable(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for forward in (model, compiled):
        actual = gradients(model, forward, prompt.to(device))
        for name, grad in expected.items():
            error = (actual[name] - grad).norm() / grad.norm().clamp(min=1e-6)
            assert error <= 1e-4, name
