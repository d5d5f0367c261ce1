from hypothesis import given
from hypothesis import strategies as st

from tpu_kernels.projection.routing import expected_routing, worst_routing

layers = st.tuples(
    st.integers(1, 40), st.integers(1, 8), st.sampled_from([8, 16, 64]), st.sampled_from([1, 2, 8])
)


@given(layers)
def test_a_token_goes_to_each_expert_at_most_once(layer):
    tokens, top_k, *_ = layer
    for routing in (expected_routing(*layer), worst_routing(*layer)):
        assert len(routing.index) == tokens
        for experts in routing.index:
            own = [expert for expert in experts if expert < routing.local]
            assert len(experts) == top_k
            assert len(set(own)) == len(own)
        assert sum(routing.group_sizes) <= tokens * top_k


@given(layers)
def test_the_worst_routing_makes_as_much_work_as_there_can_be(layer):
    tokens, top_k, experts, groups = layer
    worst, expected = worst_routing(*layer), expected_routing(*layer)
    assert worst.active == min(experts // groups, tokens * top_k)
    assert worst.active >= expected.active
    assert sum(worst.group_sizes) == tokens * min(top_k, experts // groups) >= sum(expected.group_sizes)


@given(layers)
def test_without_groups_every_choice_is_here(layer):
    tokens, top_k, experts, _ = layer
    assert sum(expected_routing(tokens, top_k, experts, 1).group_sizes) == tokens * top_k
