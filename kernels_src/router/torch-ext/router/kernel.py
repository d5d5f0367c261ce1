"""The Pallas kernel. Axis letters: T tokens, E experts, K experts chosen for a token.

A block is of whole rows. Experts are chosen one after the other, each by two reductions along the row::

    logits ──> scores (+ bias) ──> best groups ──> K times: largest value, the first that has it ──> weights, indices
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .gradient import with_gradient_of
from .reference import TINY, scores_of
from .reference import route as reference

MOST_EXPERTS, MOST_CHOSEN, MOST_GROUPS = 512, 16, 32
# Of a block: enough to hide what a step costs, and half a MiB of float32 for the most experts.
ROWS = 256


def route(
    logits: jax.Array,
    correction_bias: jax.Array | None = None,
    *,
    top_k: int,
    scoring_func: str = "softmax",
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    n_group: int = 1,
    topk_group: int = 1,
    group_top: int = 2,
    tpu: str = "v6e",
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Chooses the experts of each token.

    Args:
      logits: [T, E], bf16 or f32.
      correction_bias: [E], bf16 or f32: is added to the scores for the choice, not for the weights.
      top_k: K, experts per token.
      scoring_func: "softmax" or "sigmoid".
      norm_topk_prob: weights of a token add up to one, before they are scaled.
      routed_scaling_factor: of the weights.
      n_group, topk_group: only experts of the best `topk_group` of `n_group` equal groups are chosen.
      group_top: how many of its best experts make up a group's score.
      tpu: generation that the kernel is made for.
      interpret: as in `pallas_call`.

    Returns: weights, f32, and indices, i32, both [T, K], best first.
    """
    settings = {
        "top_k": top_k,
        "scoring_func": scoring_func,
        "norm_topk_prob": norm_topk_prob,
        "routed_scaling_factor": routed_scaling_factor,
        "n_group": n_group,
        "topk_group": topk_group,
        "group_top": group_top,
    }

    def kernel(logits: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        if logits.shape[0] == 0:
            return jnp.zeros((0, top_k), jnp.float32), jnp.zeros((0, top_k), jnp.int32)
        return _call(logits, bias, settings, interpret)

    return with_gradient_of(functools.partial(reference, **settings), kernel)(logits, correction_bias)


def _call(
    logits: jax.Array, bias: jax.Array | None, settings: dict[str, Any], interpret: Any
) -> tuple[jax.Array, jax.Array]:
    (t, e), k = logits.shape, settings["top_k"]
    rows = min(ROWS, t)
    biases = [] if bias is None else [bias.reshape(1, e)]
    weights, index = pl.pallas_call(
        functools.partial(_block, **settings),
        grid=(pl.cdiv(t, rows),),
        in_specs=[
            pl.BlockSpec((rows, e), lambda i: (i, 0)),
            *[pl.BlockSpec((1, e), lambda i: (0, 0)) for _ in biases],
        ],
        out_specs=[pl.BlockSpec((rows, k), lambda i: (i, 0))] * 2,
        out_shape=[jax.ShapeDtypeStruct((t, k), dtype) for dtype in (jnp.float32, jnp.int32)],
        cost_estimate=pl.CostEstimate(
            flops=(4 + 4 * k) * t * e,
            transcendentals=t * e,
            bytes_accessed=t * e * logits.dtype.itemsize + 8 * t * k,
        ),
        name="route",
        interpret=interpret,
    )(logits, *biases)
    return weights, index


def _block(
    logits_ref: Any,
    *refs: Any,
    top_k: int,
    scoring_func: str,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    n_group: int,
    topk_group: int,
    group_top: int,
) -> None:
    *bias_refs, weights_ref, index_ref = refs
    scores = scores_of(logits_ref[...], scoring_func)
    choice = scores
    for bias_ref in bias_refs:
        choice = choice + bias_ref[...].astype(jnp.float32)
    # torch sorts NaN before all else.
    choice = jnp.where(choice != choice, jnp.inf, choice)
    if topk_group < n_group:
        choice = _in_best_groups(choice, n_group, topk_group, group_top)
    chosen = list(_best(choice, top_k))
    weights = _columns([_at(scores, index) for index in chosen])
    if norm_topk_prob:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + TINY)
    weights_ref[...] = weights * routed_scaling_factor
    index_ref[...] = _columns(chosen).astype(jnp.int32)


def _best(values: jax.Array, count: int) -> Iterator[jax.Array]:
    """Places [T, 1], as f32, of the `count` largest values of each row: of equal ones the first."""
    places = _places(values.shape)
    free = places >= 0
    for _ in range(count):
        largest = jnp.max(jnp.where(free, values, -jnp.inf), axis=1, keepdims=True)
        holds = free & (values == largest)
        place = jnp.min(jnp.where(holds, places, values.shape[1]), axis=1, keepdims=True)
        free = free & (places != place)
        yield place


def _in_best_groups(choice: jax.Array, n_group: int, topk_group: int, group_top: int) -> jax.Array:
    """`choice`, with -inf for experts outside of the best groups."""
    size = choice.shape[1] // n_group
    places = _places(choice.shape)

    def of_group(group: Any) -> jax.Array:
        return (places >= group * size) & (places < (group + 1) * size)

    group_scores = []
    for group in range(n_group):
        inside = jnp.where(of_group(group), choice, -jnp.inf)
        best = [_at(choice, place) for place in _best(inside, group_top)]
        group_scores.append(sum(best[1:], start=best[0]))
    allowed = places < 0
    for group in _best(_columns(group_scores), topk_group):
        allowed = allowed | of_group(group)
    return jnp.where(allowed, choice, -jnp.inf)


def _at(values: jax.Array, place: jax.Array) -> jax.Array:
    """The value [T, 1] at a place of each row."""
    return jnp.sum(jnp.where(_places(values.shape) == place, values, 0.0), axis=1, keepdims=True)


def _columns(columns: list[jax.Array]) -> jax.Array:
    """Columns [T, 1] side by side."""
    places = _places((columns[0].shape[0], len(columns)))
    result = jnp.zeros(places.shape, jnp.float32)
    for place, column in enumerate(columns):
        result = jnp.where(places == place, column, result)
    return result


def _places(shape: tuple[int, ...]) -> jax.Array:
    """Each element's place in its row. As f32, in which a TPU reduces fastest, and which holds them exactly."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, 1).astype(jnp.float32)
