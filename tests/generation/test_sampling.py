import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig
from transformers.generation import LogitsProcessorList
from transformers.generation import logits_process as stock

import tpu_kernels
from tpu_kernels.generation.sampling import Sampling, choose, mark

VOCABULARY = 40


def processors(values: dict[str, float]) -> LogitsProcessorList:
    """transformers' own, in the order in which it applies them."""
    kinds = {
        "repetition_penalty": stock.RepetitionPenaltyLogitsProcessor,
        "temperature": stock.TemperatureLogitsWarper,
        "top_k": stock.TopKLogitsWarper,
        "top_p": stock.TopPLogitsWarper,
        "min_p": stock.MinPLogitsWarper,
    }
    return LogitsProcessorList(kind(values[name]) for name, kind in kinds.items() if name in values)


@given(
    values=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0.3, 3.0),
            "top_k": st.integers(1, VOCABULARY + 5),
            "top_p": st.floats(0.05, 0.99),
            "min_p": st.floats(0.01, 0.9),
            "repetition_penalty": st.floats(0.5, 2.0),
        },
    ),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60)
def test_draws_have_the_distribution_that_transformers_draws_from(values, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(1, VOCABULARY, generator=generator)
    ids = torch.randint(0, VOCABULARY, (1, 8), generator=generator)
    expected = processors(values)(ids, logits.clone()).softmax(-1)[0]
    sampling = Sampling.of(processors(values), sample=True)
    seen = torch.zeros(1, VOCABULARY, dtype=torch.bool).scatter_(1, ids, True)
    # An even grid in place of random numbers: each token's share of it is its probability, to a grid step at each end.
    draws = 4000
    uniform = (torch.arange(draws) + 0.5) / draws

    tokens = choose(
        logits.expand(draws, -1),
        uniform,
        sampling.values("cpu"),
        seen.expand(draws, -1) if "repetition_penalty" in values else None,
        sampling.form,
    )

    shares = torch.bincount(tokens, minlength=VOCABULARY) / draws
    assert (shares - expected).abs().max() <= 2 / draws + 1e-5
    assert not shares[expected == 0].any()


def test_the_last_rounding_error_draws_a_token_that_is_likely():
    logits = torch.tensor([[0.0, 0.0, -1e9]])
    sampling = Sampling(sample=True)
    assert choose(logits, torch.tensor([1.0]), sampling.values("cpu"), None, sampling) == 1


def test_greedy_takes_the_likeliest_after_the_penalty():
    logits = torch.tensor([[2.0, 1.9, 0.0]])
    seen = mark(torch.zeros(1, 3, dtype=torch.bool), torch.tensor([0]))
    sampling = Sampling(repetition_penalty=2.0)
    assert choose(logits, torch.zeros(1), sampling.values("cpu"), seen, sampling.form) == 1


def test_a_loop_draws_what_the_prompt_makes_likely(model):
    """End to end, with real random numbers: a chi-squared test of the first two tokens' frequencies."""
    rows = 3000
    ids = torch.randint(3, 250, (1, 6), generator=torch.Generator().manual_seed(3))
    config = GenerationConfig(do_sample=True, temperature=0.6, top_k=5, max_new_tokens=1)
    with torch.no_grad():
        logits = model(ids).logits[:, -1]
    expected = processors({"temperature": 0.6, "top_k": 5})(ids, logits).softmax(-1)[0]
    torch.manual_seed(0)

    made = tpu_kernels.generate(model, ids.expand(rows, -1), generation_config=config)[:, -1]

    counts = torch.bincount(made, minlength=expected.shape[0])
    likely = expected > 0
    assert counts[~likely].sum() == 0
    chi_squared = ((counts - rows * expected)[likely] ** 2 / (rows * expected[likely])).sum()
    assert chi_squared < 18.5, "4 degrees of freedom: beyond that in one of a thousand"


def test_a_seed_gives_the_same_tokens_whatever_the_steps_of_a_dispatch(model, prompts):
    made = []
    for steps in (1, 4):
        torch.manual_seed(5)
        made.append(
            tpu_kernels.generate(model, **prompts, do_sample=True, top_p=0.9, max_new_tokens=6, steps=steps)
        )
    assert torch.equal(*made)
    torch.manual_seed(6)
    assert not torch.equal(
        made[0], tpu_kernels.generate(model, **prompts, do_sample=True, top_p=0.9, max_new_tokens=6)
    )


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_is_that_of_transformers(model, prompts, penalty):
    options = {"do_sample": False, "repetition_penalty": penalty, "max_new_tokens": 12}
    assert torch.equal(
        tpu_kernels.generate(model, **prompts, **options), model.generate(**prompts, **options)
    )
