"""The layer as JAX sees it: arrays in, arrays out, differentiable.

Axis letters: T tokens, k choices a token, E experts, H hidden size, I intermediate size, U columns of the first
product: 2I, or I without a gate.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from .activations import Gate
from .composed import composed_experts, shared_expert
from .config import choose
from .kernel import call
from .ragged_dot.tiles import round_up
from .shapes import Config, Shape


def fused_experts(
    hidden_states: jax.Array,
    top_k_index: jax.Array,
    top_k_weights: jax.Array,
    gate_up_proj: jax.Array,
    down_proj: jax.Array,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    gate_up_scale: jax.Array | None = None,
    down_scale: jax.Array | None = None,
    shared_gate_up: jax.Array | None = None,
    shared_down: jax.Array | None = None,
    shared_weights: jax.Array | None = None,
    *,
    transposed: bool = False,
    activation: str = "silu",
    gated: bool = True,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    tpu: str = "v6e",
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """The experts of a mixture-of-experts layer: each token through its k experts, summed by weight.

    One kernel call for up to some hundred tokens (`config.choose`); for more, tokens are sorted by expert for two
    grouped matmuls. The gradient is that of the latter.

    Args:
      hidden_states: [T, H], bf16 or f32.
      top_k_index: [T, k] int32. An index of E or more is another rank's expert: it contributes nothing.
      top_k_weights: [T, k], bf16 or f32.
      gate_up_proj: [E, U, H], or [E, H, U] when `transposed`; the dtype of `hidden_states`, or int8. Or MXFP4 words of
        `ragged_dot.quantised.pack_mxfp4`, with `transposed`.
      down_proj: [E, H, I], or [E, I, H] when `transposed`.
      gate_up_bias, down_bias: [E, U] and [E, H]; both or none.
      gate_up_scale, down_scale: [E, U] and [E, H], f32: what the columns of int8 weights are multiplied by; or the
        exponents of MXFP4.
      shared_gate_up, shared_down: one more expert, which all tokens have: [U', H] and [H, I'], or [H, U'] and [I', H]
        when `transposed`. In the same call if it is as large as the others, without biases and not quantised; else
        beside it.
      shared_weights: [T], what that expert's results are multiplied by; None: nothing.
      activation, gated, interleaved, alpha, limit, up_offset: see `activations.Gate`.
      tpu: generation that the kernel is made for.
      config: in place of the chosen one.
      interpret: as in `pallas_call`.

    Returns: [T, H] in the dtype of `hidden_states`; sums are in f32. A token with an inf or NaN, in its state or on
      the way, has inf or NaN in its row; no other row is touched by it.
    """
    gate = Gate(activation, gated, interleaved, alpha, limit, up_offset)
    static = _Static(gate, transposed, tpu, config, interpret)
    vectors = (gate_up_bias, down_bias, gate_up_scale, down_scale)
    index = top_k_index.astype(jnp.int32)
    if shared_gate_up is not None and shared_weights is None:
        shared_weights = jnp.ones(len(hidden_states), jnp.float32)
    shared = (shared_gate_up, shared_down, shared_weights)
    return _fused_experts(
        static, hidden_states, index, top_k_weights, gate_up_proj, down_proj, *vectors, *shared
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Static:
    """What a program is specialised for. Compared by identity: `interpret` may be an unhashable record."""

    gate: Gate
    transposed: bool
    tpu: str
    config: Config | None
    interpret: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused_experts(static: _Static, *operands: Any) -> jax.Array:
    hidden_states, index, weights, gate_up, down, *others = operands
    vectors, shared = others[:4], others[4:]
    shape = shape_of(
        hidden_states,
        index,
        weights,
        gate_up,
        down,
        gate=static.gate,
        transposed=static.transposed,
        biased=vectors[0] is not None,
        shared=shared[0],
    )
    no_work = hidden_states.size == 0 or index.size == 0 or down.size == 0
    if shared[0] is not None and (no_work or not shape.shared):
        routed = _fused_experts(static, *operands[:-3], None, None, None)
        return _beside(static, routed, hidden_states, *shared)
    if no_work:
        return jnp.zeros_like(hidden_states)
    config = static.config or choose(shape, static.tpu)
    if config is None:
        return _composed(static, *operands)
    if shape.choices_first:
        index, weights = index.T, weights.T
    if shape.gate_up_contraction_first is not static.transposed:
        gate_up = jnp.swapaxes(gate_up, 1, 2)
        shared[0] = shared[0] if shared[0] is None else shared[0].T
    if shape.down_contraction_first is not static.transposed:
        down = jnp.swapaxes(down, 1, 2)
        shared[1] = shared[1] if shared[1] is None else shared[1].T
    if static.interpret is False:
        # Else XLA may bring all experts' weights to vector memory ahead of the call, active or not.
        in_hbm = functools.partial(pltpu.with_memory_space_constraint, memory_space=pltpu.HBM)
        gate_up, down = in_hbm(gate_up), in_hbm(down)
        if shape.mxfp4:
            vectors[2:] = map(in_hbm, vectors[2:])
        if shape.shared:
            shared[:2] = map(in_hbm, shared[:2])
    named = {"index": index, "weights": weights, "x": hidden_states, "gate_up": gate_up, "down": down}
    of_columns = zip(("gate_up_bias", "down_bias", "gate_up_scale", "down_scale"), vectors, strict=True)
    named |= {name: vector for name, vector in of_columns if vector is not None}
    if shape.shared:
        into, back, share = shared
        named |= {
            "shared_gate_up": into,
            "shared_down": back,
            "shared_weights": share[None].astype(jnp.float32),
        }
    return call(named, shape, static.gate, config, static.interpret)


def _composed(static: _Static, *operands: Any) -> jax.Array:
    *experts, into, back, share = operands
    out = composed_experts(
        *experts,
        gate=static.gate,
        transposed=static.transposed,
        tpu=static.tpu,
        interpret=static.interpret,
    )
    return out if into is None else _beside(static, out, operands[0], into, back, share)


def _beside(static: _Static, out: jax.Array, hidden_states: jax.Array, *shared: jax.Array) -> jax.Array:
    """The experts' result `out` with that of a shared one."""
    more = shared_expert(hidden_states, *shared, gate=static.gate, transposed=static.transposed)
    return (out.astype(jnp.float32) + more).astype(out.dtype)


def _forward(static: _Static, *operands: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    return _fused_experts(static, *operands), operands


def _backward(static: _Static, operands: tuple[Any, ...], grad: jax.Array) -> tuple[Any, ...]:
    hidden_states, index, *floats = operands

    def layer(hidden_states: jax.Array, *floats: Any) -> jax.Array:
        return _composed(static, hidden_states, index, *floats)

    _, pullback = jax.vjp(layer, hidden_states, *floats)
    grad_hidden, *others = pullback(grad)
    return grad_hidden, None, *others


_fused_experts.defvjp(_forward, _backward)


def shape_of(
    hidden_states: jax.Array,
    index: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    gate: Gate,
    transposed: bool,
    biased: bool,
    shared: jax.Array | None = None,
) -> Shape:
    """What the kernel is made for: the operands' axes, and how XLA stores them."""
    tokens, hidden = hidden_states.shape
    columns = gate_up.shape[2 if transposed else 1]
    as_written = gate_up.dtype == jnp.int32
    return Shape(
        tokens=tokens,
        choices=index.shape[1],
        experts=down.shape[0],
        hidden=hidden,
        intermediate=columns // 2 if gate.gated else columns,
        gate_up_columns=columns,
        dtype=hidden_states.dtype,
        weight_dtype=gate_up.dtype,
        routing_dtype=weights.dtype,
        biased=biased,
        choices_first=stored_transposed(*index.shape),
        gate_up_contraction_first=transposed is (as_written or not stored_transposed(*gate_up.shape[1:])),
        down_contraction_first=transposed is (as_written or not stored_transposed(*down.shape[1:])),
        interleaved=gate.interleaved,
        shared=shared is not None
        and not biased
        and (shared.shape, shared.dtype, gate_up.dtype)
        == (gate_up.shape[1:], gate_up.dtype, hidden_states.dtype),
    )


def stored_transposed(rows: int, columns: int) -> bool:
    """Whether XLA:TPU stores ``[..., rows, columns]`` with rows minor: where that pads less.

    Tiles have 128 lanes and 8 sublanes, or for a shorter axis 4, 2 or 1.

    Example:
      >>> stored_transposed(2816, 704)
      True
    """

    def padded(sublanes: int, lanes: int) -> int:
        return round_up(sublanes, min(8, 1 << (sublanes - 1).bit_length())) * round_up(lanes, 128)

    return padded(columns, rows) < padded(rows, columns)
