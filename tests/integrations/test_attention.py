"""`enable(attention=True)`: whole models' tokens against their own eager attention on the CPU."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache

import tpu_kernels
from tpu_kernels import bench
from tpu_kernels.integrations.attention import NAME

TOKENS = 16
CACHE = 64


def load(folder, **kwargs):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="batched_mm", **kwargs
    ).eval()


def enabled(folder, device):
    model = load(folder, device_map=device)
    report = tpu_kernels.enable(model, experts=False, attention=True)
    assert model.config._attn_implementation == NAME
    return model, report


def programs(name="decode_attention"):
    """How many programs were made for an op that the registered function calls; none for shapes that had one."""
    return sum(AttentionInterface._global_mapping[NAME].__globals__[name].paths.values())


def greedy(model, prompt, mask=None, **kwargs):
    mask = torch.ones_like(prompt) if mask is None else mask
    return model.generate(
        prompt,
        attention_mask=mask,
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=None,
        **kwargs,
    ).cpu()


def padded():
    """Prompts of 12 and 5 tokens, the latter padded on the left."""
    torch.manual_seed(0)
    prompt, mask = torch.randint(5, 200, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    prompt[1, :7], mask[1, :7] = 0, 0
    return prompt, mask


SWEPT = ["gemma2", "gemma4", "mixtral", "qwen3-next", "qwen3.5-moe"]


@pytest.mark.parametrize(
    "family", ["qwen3-moe", "gpt-oss", *[pytest.param(name, marks=pytest.mark.slow) for name in SWEPT]]
)
@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_greedy_tokens_are_those_of_eager_attention(family, cache, folder, device):
    """gpt-oss: sinks, and windows shorter than what is generated; gemma2: a soft cap."""
    prompt, mask = padded()
    kwargs = {"cache_implementation": "static"} if cache == "static" else {}
    expected = greedy(load(folder(family)), prompt, mask, **kwargs)
    model, _ = enabled(folder(family), device)
    before = programs()
    # Models with sliding windows compile a graph a step up to this limit; two tell as much as eight.
    with torch._dynamo.config.patch(recompile_limit=2):
        tokens = greedy(model, prompt, mask, **kwargs)
    assert torch.equal(tokens, expected)
    assert len(set(tokens[0, 12:].tolist())) > 3, "a constant output proves nothing"
    # (Another family in this process may have had the same shapes before.)
    assert programs() if cache == "static" else programs() == before
    assert programs("flash_attention")


@pytest.mark.parametrize("steps", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_training_with_experts_and_attention(steps, folder, device):
    """Gradients of padded batches against eager attention and experts on the CPU; the loss falls on real text."""
    text = (Path(bench.__file__).parent / "prompt.txt").read_text()
    tokens = transformers.AutoTokenizer.from_pretrained(folder("qwen3-moe"))(text)["input_ids"]
    batch = torch.tensor(tokens[:80]).view(2, 40)
    mask = torch.ones_like(batch)
    mask[1, 33:] = 0

    def step(model):
        model.zero_grad()
        labels = batch.masked_fill(mask == 0, -100)
        given = {"input_ids": batch, "attention_mask": mask, "labels": labels}
        loss = model(**{k: v.to(model.device) for k, v in given.items()}, use_cache=False).loss
        loss.backward()
        return loss.item()

    own = load(folder("qwen3-moe")).train()
    model = load(folder("qwen3-moe"), device_map=device).train()
    tpu_kernels.enable(model, attention=True)
    losses = [step(model)]
    step(own)
    assert programs("flash_attention")
    for (name, got), expected in zip(model.named_parameters(), own.parameters(), strict=True):
        error = (got.grad.cpu() - expected.grad).norm() / expected.grad.norm().clamp(min=1e-6)
        assert error <= 1e-4, name
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps - 1):
        optimizer.step()
        losses.append(step(model))
    assert losses[-1] < losses[0] - 0.01 * (steps - 1), losses


@pytest.mark.parametrize("new", [1, 3])
def test_step_compiles_to_one_graph(new, folder, device, backend):
    """Several new tokens a step, as in speculative decoding."""
    torch.manual_seed(0)
    prompt, step = torch.randint(5, 200, (2, 12)), torch.randint(5, 200, (2, new))

    def logits(model, compile_step):
        cache = StaticCache(config=model.config, max_cache_len=CACHE)
        with torch.no_grad():
            model(prompt.to(model.device), past_key_values=cache)
            forward = torch.compile(model, backend=backend, fullgraph=True) if compile_step else model
            return forward(step.to(model.device), past_key_values=cache).logits.cpu()

    expected = logits(load(folder("qwen3-moe")), False)
    model, _ = enabled(folder("qwen3-moe"), device)
    before = programs()
    torch.testing.assert_close(logits(model, True), expected, atol=1e-4, rtol=1e-4)
    assert programs() > before


def test_names_exist_before_loading_and_are_gone_after(folder):
    report = tpu_kernels.enable(experts=False, attention=True)
    assert NAME in str(report)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder("mixtral"), attn_implementation=NAME)
    assert model.config._attn_implementation == NAME
    tpu_kernels.disable()
    assert NAME not in AttentionInterface._global_mapping
    assert NAME not in AttentionMaskInterface._global_mapping


def test_disable_gives_a_model_its_former_attention_back(folder, device):
    model, _ = enabled(folder("mixtral"), device)
    tpu_kernels.enable(model, experts=False, attention=True)
    tpu_kernels.disable(model)
    assert model.config._attn_implementation == "eager"


class Layer(torch.nn.Module):
    """What the function reads of an attention module."""

    num_key_value_groups = 2
    is_causal = True


def tensors(new=1, keys=32, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = (2, 4, new, 16), (2, 2, keys, 16), (2, 2, keys, 16)
    return [torch.randn(shape).to(dtype) for shape in shapes]


NOT_SERVED = {
    "dynamic": (tensors(), None, {}, "a step of one token without a mask"),
    "added mask": (tensors(new=9), torch.zeros(2, 1, 9, 32), {}, "one to be added to the scores"),
    "mask by head": (tensors(), torch.ones(2, 4, 1, 32, dtype=torch.bool), {}, r"is not \[B, 1, L, S\]"),
    "dtype": (tensors(dtype=torch.half), torch.ones(2, 1, 1, 32, dtype=torch.bool), {}, "float16"),
    "dropout": (tensors(), torch.ones(2, 1, 1, 32, dtype=torch.bool), {"dropout": 0.1}, "dropout of 0.1"),
}


@pytest.mark.parametrize(("given", "mask", "extra", "reason"), NOT_SERVED.values(), ids=NOT_SERVED)
def test_what_the_kernel_cannot_do_takes_sdpa_and_says_why(given, mask, extra, reason, caplog):
    tpu_kernels.enable(experts=False, attention=True)
    function = AttentionInterface._global_mapping[NAME]
    function.__globals__["log_once"].cache_clear()
    torch.manual_seed(1)
    with caplog.at_level(logging.INFO):
        out, _ = function(Layer(), *given, mask, scaling=0.25, **extra)
    torch.manual_seed(1)
    expected, _ = AttentionInterface._global_mapping["sdpa"](Layer(), *given, mask, scaling=0.25, **extra)
    torch.testing.assert_close(out, expected)
    assert re.search(reason, "\n".join(caplog.messages))


@pytest.mark.parametrize("new", [1, 9])
def test_sinks_and_soft_cap_agree_on_both_paths(new, device):
    """One softmax over keys and sink, within the op and in plain torch."""
    tpu_kernels.enable(experts=False, attention=True)
    function = AttentionInterface._global_mapping[NAME]
    query, key, value = tensors(new)
    mask = (torch.arange(32) <= torch.arange(20 - new, 20)[:, None]).expand(2, 1, -1, -1)
    sinks = torch.randn(4)
    scores = 0.25 * query.double() @ key.double().repeat_interleave(2, 1).mT
    scores = 5 * torch.tanh(scores / 5)
    scores = torch.cat(
        [scores.masked_fill(~mask, -torch.inf), sinks.double().view(1, 4, 1, 1).expand(2, -1, new, -1)], -1
    )
    expected = (scores.softmax(-1)[..., :-1] @ value.double().repeat_interleave(2, 1)).transpose(1, 2)
    given = [t.to(device) for t in (query, key, value, mask)]
    out, _ = function(Layer().eval(), *given, scaling=0.25, softcap=5.0, s_aux=sinks.to(device))
    torch.testing.assert_close(out.cpu().double(), expected, atol=1e-5, rtol=1e-5)


def test_a_mask_with_a_gap_is_not_taken_for_one_without(device):
    tpu_kernels.enable(experts=False, attention=True)
    mask = torch.zeros(2, 1, 1, 32, dtype=torch.bool)
    mask[..., :9] = True
    mask[1, ..., 5] = False
    given = [t.to(device) for t in (*tensors(), mask)]
    out, _ = AttentionInterface._global_mapping[NAME](Layer().eval(), *given, scaling=0.25)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


def test_transformers_takes_it_for_an_attention_repository(monkeypatch):
    """As it loads one from the Hub: by `supports_flash_attn`, with the mask function of sdpa."""
    from transformers.integrations import hub_kernels

    kernel = tpu_kernels.get_kernel("tpu-kernels/attention", version=1)
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *args, **kwargs: kernel)
    name = "tpu-kernels/attention@v1"
    try:
        hub_kernels.load_and_register_attn_kernel(name)
        assert AttentionInterface._global_mapping[name] is kernel.attention_forward
        assert AttentionMaskInterface._global_mapping[name] is AttentionMaskInterface._global_mapping["sdpa"]
    finally:
        for table in (AttentionInterface, AttentionMaskInterface):
            table._global_mapping.pop(name, None)
