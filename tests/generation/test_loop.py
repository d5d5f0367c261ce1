import functools
import itertools

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, TextIteratorStreamer

import tpu_kernels
from tpu_kernels.bench.tokenizer import build_tokenizer
from tpu_kernels.errors import DeviceError, GenerationError, IntegrationError
from tpu_kernels.generation import compilation, programs
from tpu_kernels.generation.compilation import compile_step
from tpu_kernels.generation.programs import Programs
from tpu_kernels.generation.session import exact_pieces, padded_pieces

from .conftest import GREEDY, over

FAMILIES = ("qwen3-moe", "mixtral", "gpt-oss", "gemma4", "qwen3.5-moe", "qwen3-next")


class Tokens:
    """A streamer that keeps what it is given, and may be interrupted."""

    def __init__(self, interrupt_after=None):
        self.puts = []
        self.ended = False
        self._interrupt_after = interrupt_after

    def put(self, tokens):
        self.puts.append(tokens)
        if len(self.puts) == self._interrupt_after:
            raise KeyboardInterrupt

    def end(self):
        self.ended = True


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(load, prompts, family):
    """Rows of different lengths, past the window of 32, the prompt in one padded piece and in several."""
    model = load(family)
    expected = model.generate(**prompts, **GREEDY, max_new_tokens=30)
    assert torch.equal(tpu_kernels.generate(model, **prompts, **GREEDY, max_new_tokens=30, steps=7), expected)
    assert torch.equal(tpu_kernels.generate(model, **prompts, **GREEDY, max_new_tokens=30, chunk=8), expected)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.device if family == "gpt-oss" else pytest.mark.slow)
        for family in FAMILIES
    ],
)
def test_the_device_makes_them_with_one_graph_a_bucket(load, prompts, device, family, monkeypatch):
    """Past the window of 32; transformers' own static cache falls back to single operations there."""
    donated = []

    def on_compiled(debug):
        donated.append(debug.stablehlo_forward_text[0].count("jax.buffer_donor = true"))

    monkeypatch.setattr(programs, "compile_step", functools.partial(compile_step, on_compiled=on_compiled))
    new = 28
    expected = load(family).generate(**prompts, **GREEDY, max_new_tokens=new)
    model = load(family, device)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    for columns in (20, 17):
        ids = {name: tensor[:, -columns:] for name, tensor in prompts.items()}
        made = tpu_kernels.generate(model, **ids, **GREEDY, max_new_tokens=new)
        if columns == 20:
            assert torch.equal(made, expected)

    if device == "tpu":
        cache = tpu_kernels.StaticCache(model.config, 64)
        held = 2 * sum(not linear for linear in cache.is_linear) + 2 * sum(cache.is_linear)
        # Token, finished, position and all of the cache; prefill makes that, it does not write to it.
        assert donated == [3, 3 + held]
    causes = [compilation.cause for compilation in Programs.of(model).compilations]
    assert causes == ["the first of its kind"] * (2 if device == "tpu" else 0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(causes)


@pytest.mark.device
def test_sampling_settings_are_no_reason_to_compile(load, prompts, device):
    """And a seed means the same on the device and on the CPU."""
    own, model = load("mixtral"), load("mixtral", device)
    options = {"do_sample": True, "max_new_tokens": 18, "repetition_penalty": 1.2}
    for temperature, top_p in ((0.7, 0.9), (1.1, 0.5)):
        made = []
        for each in (own, model):
            torch.manual_seed(0)
            made.append(
                tpu_kernels.generate(each, **prompts, **options, temperature=temperature, top_p=top_p)
            )
        assert torch.equal(*made)
    assert len(Programs.of(model).compilations) == (2 if device == "tpu" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt-oss", "qwen3.5-moe"])
def test_buffers_that_cannot_be_donated_make_the_same_tokens(load, prompts, device, family, monkeypatch):
    """In pieces, with a penalty, and past the window: whatever the state can hold is exchanged."""
    monkeypatch.setattr(compilation, "_donating_backend", lambda: None)
    options = {**GREEDY, "max_new_tokens": 20, "repetition_penalty": 1.2}
    expected = load(family).generate(**prompts, **options)
    model = load(family, device)
    for steps in (1, 8):
        assert torch.equal(tpu_kernels.generate(model, **prompts, **options, chunk=16, steps=steps), expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt-oss", "gemma4"])
def test_three_hundred_steps_past_the_window(load, prompts, device, family):
    expected = load(family).generate(**prompts, **GREEDY, max_new_tokens=340)
    model = load(family, device)
    assert torch.equal(tpu_kernels.generate(model, **prompts, **GREEDY, max_new_tokens=340), expected)
    assert len(Programs.of(model).compilations) == (2 if device == "tpu" else 0)


@pytest.mark.slow
def test_five_hundred_steps_and_twenty_prompt_lengths_compile_nothing_more(load, device):
    model = load("qwen3-moe", device)
    ids = torch.randint(3, 250, (1, 60), generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    tpu_kernels.generate(model, ids, **GREEDY, max_new_tokens=512)
    for columns in range(21, 61, 2):
        tpu_kernels.generate(model, ids[:, :columns], **GREEDY, max_new_tokens=40)
    steps = [compilation.key.step for compilation in Programs.of(model).compilations]
    if device == "tpu":
        # Prompts of up to 32 and up to 64 tokens; caches of 128 positions, and of 1024 for the long one.
        assert steps.count("decode") == 2
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(steps)


@pytest.mark.parametrize("steps", [1, 5, 16])
def test_it_stops_at_end_tokens_and_strings_as_transformers_does(model, prompts, steps):
    tokenizer = build_tokenizer()
    free = model.generate(**prompts, **GREEDY, max_new_tokens=30)
    end = int(free[1, 20 + 11])
    string = tokenizer.decode(free[2, 20 + 7 : 20 + 8])
    for options in (
        {"eos_token_id": [end, 7], "pad_token_id": 1},
        {"stop_strings": [string], "tokenizer": tokenizer},
        {"stop_strings": [string], "tokenizer": tokenizer, "eos_token_id": end, "pad_token_id": 1},
    ):
        expected = model.generate(**prompts, **GREEDY, max_new_tokens=30, **options)
        made = tpu_kernels.generate(model, **prompts, **GREEDY, max_new_tokens=30, steps=steps, **options)
        assert torch.equal(made, expected)


def test_stop_strings_need_a_tokenizer(model, prompts):
    with pytest.raises(GenerationError, match="tokenizer="):
        tpu_kernels.generate(model, **prompts, stop_strings=["x"])


def test_a_streamer_is_told_what_transformers_tells_it(model, prompts):
    one = {name: tensor[2:] for name, tensor in prompts.items()}
    expected, made = Tokens(), Tokens()
    model.generate(**one, **GREEDY, max_new_tokens=9, streamer=expected)
    tpu_kernels.generate(model, **one, **GREEDY, max_new_tokens=9, streamer=made, steps=4)
    assert made.ended
    assert [tokens.tolist() for tokens in made.puts] == [tokens.tolist() for tokens in expected.puts]
    text = TextIteratorStreamer(build_tokenizer(), skip_prompt=True, timeout=5)
    sequences = tpu_kernels.generate(model, **one, **GREEDY, max_new_tokens=9, streamer=text)
    assert "".join(text) == build_tokenizer().decode(sequences[0, 20:])


def test_an_interrupt_ends_the_stream_and_leaves_everything_usable(load, prompts, device):
    model = load("mixtral", device)
    expected = load("mixtral").generate(**prompts, **GREEDY, max_new_tokens=20)
    cache = tpu_kernels.StaticCache(model.config, 64)
    streamer = Tokens(interrupt_after=5)
    with pytest.raises(KeyboardInterrupt):
        tpu_kernels.generate(
            model, **prompts, **GREEDY, max_new_tokens=20, streamer=streamer, steps=4, **over(cache)
        )
    assert streamer.ended
    assert cache.batch is None
    made = tpu_kernels.generate(model, **prompts, **GREEDY, max_new_tokens=20, steps=4, **over(cache))
    assert torch.equal(made, expected)


@pytest.mark.parametrize("family", ["gpt-oss", "qwen3-next"])
def test_a_conversation_goes_on_from_its_cache(load, prompts, family):
    model = load(family)
    cache = tpu_kernels.StaticCache(model.config, 128)
    turn = tpu_kernels.generate(model, **prompts, **GREEDY, max_new_tokens=9, **over(cache))
    more = torch.randint(3, 250, (3, 11), generator=torch.Generator().manual_seed(1))
    ids = torch.cat([turn, more], 1)
    mask = torch.cat([prompts["attention_mask"], torch.ones(3, 20, dtype=torch.int64)], 1)
    expected = model.generate(ids, attention_mask=mask, **GREEDY, max_new_tokens=9)

    made = tpu_kernels.generate(model, ids, attention_mask=mask, **GREEDY, max_new_tokens=9, **over(cache))

    assert torch.equal(made, expected)
    cache.reset()
    again = tpu_kernels.generate(model, **prompts, **GREEDY, max_new_tokens=9, **over(cache))
    assert torch.equal(again, turn)


def test_the_cache_comes_back_where_outputs_do(model, prompts):
    options = {**GREEDY, "max_new_tokens": 5, "return_dict_in_generate": True}
    output = tpu_kernels.generate(model, **prompts, **options)
    assert torch.equal(output.sequences, model.generate(**prompts, **options).sequences)
    (cache,) = over(None)
    assert int(getattr(output, cache).get_seq_length()) == 24


def test_what_does_not_go_with_a_cache_is_refused_with_the_way_out(model, prompts):
    cache = tpu_kernels.StaticCache(model.config, 64)
    with pytest.raises(
        GenerationError, match=r"20 tokens and 60 new ones take 79 positions.*has 64; grow\(79\)"
    ):
        tpu_kernels.generate(model, **prompts, **GREEDY, max_new_tokens=60, **over(cache))
    tpu_kernels.generate(model, **prompts, **GREEDY, max_new_tokens=3, **over(cache))
    with pytest.raises(GenerationError, match=r"22 tokens, but the prompt has only 20.*reset"):
        tpu_kernels.generate(model, **prompts, **GREEDY, max_new_tokens=3, **over(cache))
    one = {name: tensor[2:] for name, tensor in prompts.items()}
    with pytest.raises(GenerationError, match="batch of 3, but there are 1 prompts; release"):
        tpu_kernels.generate(model, **one, **GREEDY, max_new_tokens=3, **over(cache))
    assert cache.batch == 3, "what was refused has changed nothing"
    with pytest.raises(GenerationError, match="power of two"):
        tpu_kernels.generate(model, **prompts, chunk=100)


def test_memory_that_does_not_suffice_is_an_error_of_the_device(device):
    """A tebibyte for keys, which no allocator gives; what comes after it is as before."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=8192,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        eos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config).eval().to(device)
    ids = torch.arange(4)[None]
    fits = {**GREEDY, "max_new_tokens": 4}
    expected = tpu_kernels.generate(model, ids, **fits)
    cache = tpu_kernels.StaticCache(config, 1 << 22)
    with pytest.raises(
        DeviceError, match=r"up to 8 tokens .* in a cache of 4194304 positions; use a smaller"
    ):
        tpu_kernels.generate(model, ids, **fits, **over(cache))
    assert cache.batch is None
    assert torch.equal(tpu_kernels.generate(model, ids, **fits), expected)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
        ({"use_cache": False}, "use_cache"),
    ],
)
def test_what_it_cannot_do_transformers_does(model, prompts, fallbacks, options, reason):
    expected = model.generate(**prompts, **GREEDY, max_new_tokens=4, **options)
    made = tpu_kernels.generate(model, **prompts, **GREEDY, max_new_tokens=4, **options)
    both = [output if isinstance(output, torch.Tensor) else output.sequences for output in (made, expected)]
    assert torch.equal(*both)
    assert reason in fallbacks[0]


def test_it_is_a_custom_generate(model, prompts):
    made = model.generate(**prompts, **GREEDY, max_new_tokens=6, custom_generate=tpu_kernels.decode)
    assert torch.equal(made, model.generate(**prompts, **GREEDY, max_new_tokens=6))


@pytest.mark.parametrize("length", [1, 16, 17, 500, 512, 513, 1100])
def test_pieces_are_few_and_make_up_the_prompt(length):
    for chunk in (8, 512):
        exact, padded = exact_pieces(length, chunk), padded_pieces(length, chunk)
        assert sum(exact) == length
        assert length <= sum(padded) < 2 * length + 16
        assert set(padded[1:]) <= {chunk}
        assert all(piece & (piece - 1) == 0 for piece in itertools.chain(exact, padded))


def test_enable_makes_it_the_models_own(load, prompts):
    model = load("mixtral")
    expected = model.generate(**prompts, **GREEDY, max_new_tokens=5)
    streamer = Tokens()
    report = tpu_kernels.enable(model, experts=False, generation=True)
    assert "tpu_kernels.generate" in str(report)
    made = model.generate(**prompts, **GREEDY, max_new_tokens=5, streamer=streamer, steps=2)
    assert torch.equal(made, expected)
    assert streamer.ended, "transformers passes a streamer on to no other loop than its own"
    tpu_kernels.disable(model)
    assert model.generate.__func__ is type(model).generate
    with pytest.raises(IntegrationError, match="for a model that is loaded"):
        tpu_kernels.enable(experts=False, generation=True)
