"""The shipped attention kernel as a torch op, on the device that is there."""

from __future__ import annotations

import pytest
import torch

import tpu_kernels
from tpu_kernels.errors import TpuKernelsError

B, HQ, H, L, S, D = 2, 4, 2, 2, 32, 64


@pytest.fixture(scope="module")
def kernel():
    return tpu_kernels.get_kernel("tpu-kernels/attention", version=1)


@pytest.fixture
def operands(device):
    shapes = [(B, HQ, L, D), (B, H, S, D), (B, H, S, D)]
    places = [torch.tensor([20, 32]), torch.tensor([3, 0], dtype=torch.int32)]
    return [t.to(device) for t in (*map(torch.randn, shapes), *places, torch.randn(HQ))]


def test_opcheck(kernel, device, operands):
    checks = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if device == "cpu":
        checks.append("test_autograd_registration")
    operands = [t.requires_grad_(t.is_floating_point()) for t in operands]
    for given in (operands, operands[:4]):
        torch.library.opcheck(kernel.decode_attention._overload, tuple(given), test_utils=checks)


def test_compiles_to_one_graph_and_agrees_with_sdpa(kernel, operands, backend):
    query, key, value, lengths, starts, _ = operands

    def attention(query):
        return kernel.decode_attention(query * 2, key, value, lengths, starts, window=12)

    place = torch.arange(S)
    ends = lengths.cpu()[:, None] + torch.arange(1 - L, 1)
    first = torch.maximum(starts.cpu()[:, None], ends - 12)
    mask = (place < ends[..., None]) & (place >= first[..., None])
    expected = torch.nn.functional.scaled_dot_product_attention(
        2 * query.cpu(), key.cpu(), value.cpu(), mask[:, None], enable_gqa=True
    )
    for function in (attention, torch.compile(attention, backend=backend, fullgraph=True)):
        torch.testing.assert_close(function(query).cpu(), expected, atol=1e-5, rtol=1e-5)


def test_gradients_are_those_of_sdpa(kernel, operands):
    query, key, value = (t.requires_grad_() for t in operands[:3])
    kernel.decode_attention(
        query, key, value, torch.full((B,), S, device=query.device)
    ).sin().sum().backward()
    own = [t.detach().cpu().requires_grad_() for t in (query, key, value)]
    mask = torch.ones(L, S, dtype=torch.bool).tril(S - L)
    torch.nn.functional.scaled_dot_product_attention(*own, mask, enable_gqa=True).sin().sum().backward()
    for actual, expected in zip((query, key, value), own, strict=True):
        torch.testing.assert_close(actual.grad.cpu(), expected.grad, atol=1e-5, rtol=1e-4)


def test_the_kernel_itself_runs(kernel, device, operands):
    """Interpreted on the emulated device, not its reference."""
    kernel.decode_attention(*operands)
    if device == "tpu":
        assert kernel.decode_attention.paths["reference"] == 0


def bad(**changes):
    named = {
        "query": torch.ones(B, HQ, L, D),
        "key": torch.ones(B, H, S, D),
        "value": torch.ones(B, H, S, D),
        "lengths": torch.ones(B).long(),
    }
    return {**named, **changes}


BAD = {
    "rank": (bad(query=torch.ones(B, HQ, D)), r"query has shape \(2, 4, 64\); it must have 4 axes"),
    "dtype": (bad(query=torch.ones(B, HQ, L, D).half()), "float16; supported: bfloat16 and float32"),
    "dtypes": (bad(key=torch.ones(B, H, S, D).bfloat16()), "key is torch.bfloat16; both must be the same"),
    "head dimension": (bad(key=torch.ones(B, H, S, 32)), r"key has shape .* must be \[2, H, S, 64\]"),
    "value": (bad(value=torch.ones(B, H, 1, D)), r"value has shape .* must be \[2, 2, 32, E\]"),
    "heads": (bad(query=torch.ones(B, 3, L, D)), "query has 3 heads, which is no multiple of the key's 2"),
    "prefill": (
        bad(query=torch.ones(B, HQ, 9, D)),
        "1 to 8 are supported: for more use flash_attention",
    ),
    "lengths": (bad(lengths=torch.ones(3).long()), r"lengths has shape \(3,\); it must be \[B\] = \[2\]"),
    "starts": (bad(starts=torch.ones(B)), "starts has dtype torch.float32; it must be int32"),
    "sinks": (bad(sinks=torch.ones(H)), r"sinks has shape \(2,\); it must be \[Hq\] = \[4\]"),
    "window": (bad(window=0), "window is 0; it must be at least 1"),
    "softcap": (bad(softcap=0.0), "softcap is 0.0; it must be above 0"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_clear_error(kernel, device, arguments, message):
    placed = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises(TpuKernelsError, match=message):
        kernel.decode_attention(**placed)


@pytest.fixture
def passed(device):
    """Query, key, value, starts, ends and sinks of 20 queries over 32 keys, the second sequence padded."""
    torch.manual_seed(0)
    floats = [torch.randn(shape) for shape in ((B, HQ, 20, D), (B, H, S, D), (B, H, S, D), (HQ,))]
    places = torch.tensor([0, 5]), torch.tensor([32, 30], dtype=torch.int32)
    return [t.to(device) for t in (*floats[:3], *places, floats[3])]


def dense(query, key, value, starts, ends, sinks):
    """The same in plain torch: causal, a window of 12, a soft cap of 5."""
    own = torch.arange(S - 20 + 1, S + 1)[:, None]
    place = torch.arange(S)
    seen = (place < own) & (place >= own - 12)
    seen = seen & (place >= starts[:, None, None]) & (place < ends[:, None, None])
    scores = query @ key.repeat_interleave(HQ // H, 1).mT * D**-0.5
    scores = (5 * torch.tanh(scores / 5)).masked_fill(~seen[:, None], -torch.inf)
    scores = torch.cat([scores, sinks.view(1, HQ, 1, 1).expand(B, -1, 20, 1)], -1)
    out = scores.softmax(-1)[..., :-1] @ value.repeat_interleave(HQ // H, 1)
    return out, scores.logsumexp(-1)


FORM = {"causal": True, "window": 12, "softcap": 5.0}


def test_flash_attention_and_its_gradients_are_those_of_plain_torch(kernel, device, backend, passed):
    own = [t.detach().cpu().requires_grad_(t.is_floating_point()) for t in passed]
    expected = dense(*own)
    sum(x.sin().sum() for x in expected).backward()
    given = [t.requires_grad_(t.is_floating_point()) for t in passed]
    op = kernel.flash_attention
    compiled = torch.compile(lambda *args: op(*args, **FORM), backend=backend, fullgraph=True)
    with torch.no_grad():
        results = [op(*given, **FORM), compiled(*given)]
    results.append(op(*given, **FORM))
    for result in results:
        for x, y in zip(result, expected, strict=True):
            torch.testing.assert_close(x.detach().cpu(), y.detach(), atol=1e-5, rtol=1e-5)
    sum(x.sin().sum() for x in results[-1]).backward()
    for x, y in zip(given, own, strict=True):
        if y.requires_grad:
            torch.testing.assert_close(x.grad.cpu(), y.grad, atol=1e-5, rtol=1e-4)
    if device == "tpu":
        assert op.paths["reference"] == 0
    else:
        checks = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration"]
        torch.library.opcheck(op._overload, tuple(given), FORM, test_utils=checks)


def test_a_window_without_causality_is_refused(kernel, passed):
    with pytest.raises(TpuKernelsError, match="window is 4 without causal=True; give starts and ends"):
        kernel.flash_attention(*passed[:3], window=4)


@pytest.fixture
def appended(device):
    """Operands of a step of one token: query, new key, new value, caches, lengths."""
    torch.manual_seed(0)
    shapes = [(B, HQ, 1, D), (B, H, 1, D), (B, H, 1, D), (B, H, S, D), (B, H, S, D)]
    return [t.to(device) for t in (*map(torch.randn, shapes), torch.tensor([20, 1]))]


def test_append_writes_the_new_token_and_attends_to_it(kernel, device, backend, appended):
    """At places of its own, as in a rolled cache."""
    query, new_key, new_value, key, value, lengths = appended
    places = torch.tensor([7, 0], device=device)

    def step(query, key, value):
        out, *caches = kernel.append_attention(query, new_key, new_value, key, value, lengths, places)
        for cache, written in zip((key, value), caches, strict=True):
            cache.copy_(written)
        return out

    own = [cache.cpu().clone() for cache in (key, value)]
    for cache, new in zip(own, (new_key.cpu(), new_value.cpu()), strict=True):
        for sequence, place in enumerate(places.tolist()):
            cache[sequence, :, place] = new[sequence, :, 0]
    expected = kernel.decode_attention(query.cpu(), *own, lengths.cpu())
    for function in (step, torch.compile(step, backend=backend, fullgraph=True)):
        caches = [cache.clone() for cache in (key, value)]
        torch.testing.assert_close(function(query, *caches).cpu(), expected, atol=1e-5, rtol=1e-5)
        for cache, wanted in zip(caches, own, strict=True):
            assert torch.equal(cache.cpu(), wanted)
    if device == "tpu":
        assert kernel.append_attention.paths["reference"] == 0
    else:
        checks = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
        given = (*appended, places)
        torch.library.opcheck(kernel.append_attention._overload, given, test_utils=checks)


def test_one_cache_may_hold_keys_that_are_the_values(kernel, device, appended):
    query, new_key, _, key, _, lengths = appended
    out, cache = kernel.append_attention(query, new_key, None, key, None, lengths)
    own = cache.cpu()
    expected = kernel.decode_attention(query.cpu(), own, own.clone(), lengths.cpu())
    torch.testing.assert_close(out.cpu(), expected)
    torch.testing.assert_close(kernel.decode_attention(query.cpu(), own, None, lengths.cpu()), expected)


BAD_APPENDS = {
    "new key": ({"new_key": torch.ones(B, H, 2, D)}, r"new_key has shape .* must be \[2, 2, 1, 64\]"),
    "new dtype": ({"new_key": torch.ones(B, H, 1, D).bfloat16()}, "new_key is torch.bfloat16 and key is"),
    "one value": ({"value": None}, "new_value and value must both be given"),
    "places": ({"places": torch.ones(B, 1).long()}, r"places has shape \(2, 1\); it must be \[B\] = \[2\]"),
}


@pytest.mark.parametrize(("change", "message"), BAD_APPENDS.values(), ids=BAD_APPENDS)
def test_a_bad_append_is_one_clear_error(kernel, device, appended, change, message):
    names = "query", "new_key", "new_value", "key", "value", "lengths"
    arguments = {**dict(zip(names, appended, strict=True)), **change}
    placed = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises(TpuKernelsError, match=message):
        kernel.append_attention(**placed)
