"""What the kernel computes, in plain jax.numpy: it is tested against this, and a CPU runs it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Keeps a sum of sigmoids that are all zero from being divided by; any other is too large to notice.
TINY = 1e-20


def scores_of(logits: jax.Array, scoring_func: str) -> jax.Array:
    """Scores of all experts. In float32 always, as models have them: what is equal in it is a tie."""
    wide = logits.astype(jnp.float32)
    return jax.nn.sigmoid(wide) if scoring_func == "sigmoid" else jax.nn.softmax(wide, axis=-1)


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
) -> tuple[jax.Array, jax.Array]:
    """Weights and indices of the `top_k` experts with the best scores, of equal ones those with the lowest index."""
    scores = scores_of(logits, scoring_func)
    choice = scores if correction_bias is None else scores + correction_bias.astype(scores.dtype)
    if topk_group < n_group:
        grouped = choice.reshape(*choice.shape[:-1], n_group, choice.shape[-1] // n_group)
        best, _ = jax.lax.top_k(grouped, group_top)
        _, groups = jax.lax.top_k(best.sum(-1), topk_group)
        allowed = jax.nn.one_hot(groups, n_group, dtype=bool).any(-2)
        choice = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(choice.shape)
    _, index = jax.lax.top_k(jax.lax.stop_gradient(choice), top_k)
    weights = jnp.take_along_axis(scores, index, axis=-1)
    if norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdims=True) + TINY)
    return weights * routed_scaling_factor, index
