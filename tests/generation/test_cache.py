import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tpu_kernels
from tpu_kernels.errors import GenerationError
from tpu_kernels.generation.cache import bucket_length

from .conftest import GREEDY, over

FAMILIES = ("qwen3-moe", "mixtral", "gpt-oss", "gemma4", "qwen3.5-moe", "qwen3-next")


@given(st.integers(1, 1 << 20))
def test_buckets_are_few_and_hold_what_they_are_for(positions):
    length = bucket_length(positions)
    assert positions <= length < max(65, 2 * positions)
    assert length & (length - 1) == 0
    assert bucket_length(length) == length


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_generate_makes_the_same_tokens_over_it(load, prompts, family):
    """Past the sliding window, which is 32."""
    model = load(family)
    cache = tpu_kernels.StaticCache(model.config, 50)
    expected = model.generate(**prompts, **GREEDY, max_new_tokens=24)
    for _ in range(2):
        assert torch.equal(model.generate(**prompts, **GREEDY, max_new_tokens=24, **over(cache)), expected)
        cache.reset()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_generate_compiles_it_once(load, prompts, device, family):
    expected = load(family).generate(**prompts, **GREEDY, max_new_tokens=40)
    model = load(family, device)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    made = model.generate(
        **prompts, **GREEDY, max_new_tokens=40, **over(tpu_kernels.StaticCache(model.config, 64))
    )

    assert torch.equal(made, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (1 if device == "tpu" else 0)


@pytest.mark.parametrize("family", ["gpt-oss", "qwen3-next"])
def test_growing_keeps_what_it_holds(load, prompts, family):
    model = load(family)
    expected = model.generate(**prompts, **GREEDY, max_new_tokens=70)
    cache = tpu_kernels.StaticCache(model.config, 64)
    first = model.generate(**prompts, **GREEDY, max_new_tokens=40, **over(cache))
    mask = torch.cat([prompts["attention_mask"], torch.ones(3, 40, dtype=torch.int64)], 1)

    cache.grow(65)

    assert cache.max_cache_len == 128
    rest = model.generate(first, attention_mask=mask, **GREEDY, max_new_tokens=30, **over(cache))
    assert torch.equal(rest, expected)


def test_cropping_takes_the_newest_tokens_back(model, prompts, load):
    cache = tpu_kernels.StaticCache(model.config, 64)
    made = model.generate(**prompts, **GREEDY, max_new_tokens=8, **over(cache))
    cache.crop(-3)
    assert int(cache.get_seq_length()) == 20 + 7 - 3
    mask = torch.cat([prompts["attention_mask"], torch.ones(3, 5, dtype=torch.int64)], 1)
    again = model.generate(made[:, :25], attention_mask=mask, **GREEDY, max_new_tokens=3, **over(cache))
    assert torch.equal(again, made)
    with pytest.raises(GenerationError, match="reset the cache"):
        tpu_kernels.StaticCache(load("qwen3-next").config, 64).crop(-1)


def test_it_tells_its_batch_and_size_and_gives_memory_back(model, prompts):
    cache = tpu_kernels.StaticCache(model.config, 64)
    assert cache.batch is None
    assert cache.nbytes == 0
    model.generate(**prompts, **GREEDY, max_new_tokens=2, **over(cache))
    assert cache.batch == 3
    layers, heads, dim = 2, 2, 32
    assert cache.nbytes == layers * 2 * 3 * heads * 64 * dim * 4
    cache.release()
    assert cache.batch is None
    one = {name: tensor[2:] for name, tensor in prompts.items()}
    expected = model.generate(**one, **GREEDY, max_new_tokens=2)
    assert torch.equal(model.generate(**one, **GREEDY, max_new_tokens=2, **over(cache)), expected)


def test_a_cache_of_nothing_is_refused(model):
    with pytest.raises(GenerationError, match="at least 1"):
        tpu_kernels.StaticCache(model.config, 0)
