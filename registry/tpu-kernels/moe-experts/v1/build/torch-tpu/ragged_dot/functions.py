"""The kernel's functions as JAX sees them: arrays in, arrays out, differentiable.

Axis letters: M rows, K contraction, N columns, G groups, S group sizes; for experts T tokens, k choices a
token, E experts, H hidden size, I intermediate size, R = T * k pairs of a token and an expert.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from .activations import gated
from .kernel import Config, default_config, gmm, gmm_weights, interpreted_config, round_up

# Minor axes are padded to these multiples: the compiler handles 64, half a register row, by itself. An axis that
# may have to be split into tiles is padded to whole register rows.
NATIVE_MULTIPLE = 64
LONG_AXIS, LONG_MULTIPLE = 8192, 128


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None = None,
    *,
    transpose_rhs: bool = False,
    preferred_element_type: Any = None,
    tpu: str = "v6e",
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Multiplies each group of consecutive rows of `lhs` with the weights of its group.

    Args:
      lhs: [M, K], bf16 or f32; the rows of group 0 first, then those of group 1, and so on.
      rhs: [G, K, N], or [G, N, K] with `transpose_rhs`; the dtype of `lhs`.
      group_sizes: [S] int32, rows of each group. Their sum may be less than M.
      group_offset: scalar or [1] int32. `rhs` holds the weights of groups offset to offset+G-1 of the S; the
        rows of all others come out as zeros. None: S == G.
      transpose_rhs: `rhs` is stored as [G, N, K].
      preferred_element_type: dtype of the result; that of `lhs` when None. Sums are kept in f32.
      tpu: generation whose vector memory the tiles are chosen for.
      config: tile sizes of the forward product, in place of the chosen ones.
      interpret: as in `pallas_call`.

    Returns: [M, N]; zeros in rows past the groups.

    Example:
      >>> out = ragged_dot(jnp.ones((4, 64)), jnp.ones((2, 64, 64)), jnp.array([1, 2]), interpret=True)
      >>> out[:, 0].tolist()
      [64.0, 64.0, 64.0, 0.0]
    """
    offset = jnp.zeros(1, jnp.int32) if group_offset is None else group_offset.astype(jnp.int32).reshape(1)
    offset = jnp.clip(offset, 0, group_sizes.shape[0] - rhs.shape[0])
    out_dtype = jnp.dtype(preferred_element_type or lhs.dtype)
    static = _Static(transpose_rhs, out_dtype, tpu, config, interpret)
    return _ragged_dot(static, lhs, rhs, group_sizes.astype(jnp.int32), offset)


@dataclasses.dataclass(frozen=True, eq=False)
class _Static:
    """What a product is specialised for. Compared by identity: `interpret` may be an unhashable record."""

    transpose_rhs: bool
    out_dtype: Any
    tpu: str
    config: Config | None
    interpret: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged_dot(
    static: _Static, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, offset: jax.Array
) -> jax.Array:
    transpose_rhs, out_dtype = static.transpose_rhs, static.out_dtype
    m, k = lhs.shape
    n = rhs.shape[1 if transpose_rhs else 2]
    if m == 0 or k == 0 or n == 0:
        return jnp.zeros((m, n), out_dtype)
    k_padded, n_padded = _padded(k), _padded(n)
    rhs = _pad_minor(rhs, *((n_padded, k_padded) if transpose_rhs else (k_padded, n_padded)))
    if stored_transposed(*rhs.shape[1:]):
        # As XLA stores it, so that the kernel's operand is the buffer itself and not a copy.
        rhs, transpose_rhs = jnp.swapaxes(rhs, 1, 2), not transpose_rhs
    config = static.config or _config(m, k_padded, n_padded, rhs, static.tpu, static.interpret)
    out = gmm(
        _pad_minor(lhs, _rows_to_run(m, config, static.interpret), k_padded),
        rhs,
        group_sizes,
        offset,
        transpose_rhs=transpose_rhs,
        out_dtype=out_dtype,
        config=config,
        interpret=static.interpret,
    )
    return out[:m, :n]


def _forward(
    static: _Static, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, offset: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _ragged_dot(static, lhs, rhs, group_sizes, offset), (lhs, rhs, group_sizes, offset)


def _backward(static: _Static, saved: tuple[jax.Array, ...], grad: jax.Array) -> tuple[Any, ...]:
    lhs, rhs, group_sizes, offset = saved
    grad = grad.astype(lhs.dtype)
    through = dataclasses.replace(
        static, transpose_rhs=not static.transpose_rhs, out_dtype=lhs.dtype, config=None
    )
    grad_lhs = _ragged_dot(through, grad, rhs, group_sizes, offset)
    left, right = (grad, lhs) if static.transpose_rhs else (lhs, grad)
    grad_rhs = _weight_gradient(
        left, right, group_sizes, offset, rhs, tpu=static.tpu, interpret=static.interpret
    )
    return grad_lhs, grad_rhs, None, None


_ragged_dot.defvjp(_forward, _backward)


def _weight_gradient(
    left: jax.Array,
    right: jax.Array,
    group_sizes: jax.Array,
    offset: jax.Array,
    rhs: jax.Array,
    *,
    tpu: str,
    interpret: Any,
) -> jax.Array:
    """`left` [M, A] times `right` [M, B] over each group's rows, in the shape [G, A, B] of `rhs`."""
    groups, a, b = rhs.shape
    m = left.shape[0]
    if m == 0 or a == 0 or b == 0:
        return jnp.zeros(rhs.shape, rhs.dtype)
    a_padded, b_padded = _padded(a), _padded(b)
    swap = stored_transposed(a_padded, b_padded)
    if swap:
        left, right, a_padded, b_padded = right, left, b_padded, a_padded
    config = _config(m, a_padded, b_padded, rhs, tpu, interpret, weight_gradient=True)
    rows = _rows_to_run(m, config, interpret)
    left, right = _pad_minor(left, rows, a_padded), _pad_minor(right, rows, b_padded)
    out = gmm_weights(
        left,
        right,
        group_sizes,
        offset,
        groups=groups,
        out_dtype=rhs.dtype,
        config=config,
        interpret=interpret,
    )
    return (jnp.swapaxes(out, 1, 2) if swap else out)[:, :a, :b]


def _config(
    m: int, k: int, n: int, rhs: jax.Array, tpu: str, interpret: Any, *, weight_gradient: bool = False
) -> Config:
    if interpret is True:
        return interpreted_config(m, k, n, rhs.dtype)
    return default_config(m, k, n, rhs.shape[0], rhs.dtype, tpu=tpu, weight_gradient=weight_gradient)


def _padded(size: int) -> int:
    return round_up(size, NATIVE_MULTIPLE if size <= LONG_AXIS else LONG_MULTIPLE)


def _rows_to_run(m: int, config: Config, interpret: Any) -> int:
    """On a TPU the last row tile may overhang; ``interpret=True`` copies whole blocks only."""
    return round_up(m, config.tile_m) if interpret is True else m


def stored_transposed(rows: int, columns: int) -> bool:
    """Whether XLA:TPU stores ``[..., rows, columns]`` with rows minor: where that pads less to (8, 128) tiles.

    Example:
      >>> stored_transposed(2816, 704)
      True
    """
    as_written = round_up(rows, 8) * round_up(columns, 128)
    swapped = round_up(columns, 8) * round_up(rows, 128)
    return swapped < as_written


def _pad_minor(array: jax.Array, rows: int, columns: int) -> jax.Array:
    """Zeros after the two minor axes up to `rows` and `columns`."""
    if array.shape[-2:] == (rows, columns):
        return array
    minor = [(0, rows - array.shape[-2]), (0, columns - array.shape[-1])]
    return jnp.pad(array, [(0, 0)] * (array.ndim - 2) + minor)


def experts(
    hidden_states: jax.Array,
    top_k_index: jax.Array,
    top_k_weights: jax.Array,
    gate_up_proj: jax.Array,
    down_proj: jax.Array,
    *,
    activation: str = "silu",
    transposed: bool = False,
    tpu: str = "v6e",
    interpret: Any = False,
) -> jax.Array:
    """The experts of a mixture-of-experts layer: each token through its k experts, summed by weight.

    Args:
      hidden_states: [T, H], bf16 or f32.
      top_k_index: [T, k] int32, the experts of each token. An index of E or more is a sentinel of expert
        parallelism (another rank's expert): it contributes nothing.
      top_k_weights: [T, k], bf16 or f32.
      gate_up_proj: [E, 2I, H], or [E, H, 2I] when `transposed`; gate columns first, then up.
      down_proj: [E, H, I], or [E, I, H] when `transposed`.
      activation: a name in `activations.ACTIVATIONS`.
      tpu, interpret: as in `ragged_dot`.

    Returns: [T, H] in the dtype of `hidden_states`; weighting and sum are done in f32.
    """
    tokens, choices = top_k_index.shape
    hidden = hidden_states.shape[1]
    expert = top_k_index.reshape(-1).astype(jnp.int32)
    # Sentinels sort last and are in no group: the product leaves zeros in their rows.
    order = jnp.argsort(expert, stable=True)
    inverse = jnp.argsort(order)
    group_sizes = jnp.sum(expert[:, None] == jnp.arange(gate_up_proj.shape[0]), axis=0, dtype=jnp.int32)

    product = functools.partial(ragged_dot, transpose_rhs=not transposed, tpu=tpu, interpret=interpret)
    rows = _sort_rows(choices, hidden_states, order, inverse)
    inner = gated(product(rows, gate_up_proj, group_sizes), activation).astype(hidden_states.dtype)
    out = _unsort_rows(product(inner, down_proj, group_sizes), order, inverse)
    weighted = out.reshape(tokens, choices, hidden).astype(jnp.float32) * top_k_weights[..., None].astype(
        jnp.float32
    )
    return weighted.sum(axis=1).astype(hidden_states.dtype)


# The rows of a permutation and of its inverse are both gathers, so the gradients are gathers as well. JAX would
# make them scatter-adds: slow on a TPU, and seen to be wrong there for some shapes.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sort_rows(choices: int, x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Row of pair `order[r]`'s token, for each r: [T, H] to [R, H]."""
    return x[order // choices]


def _sort_rows_forward(
    choices: int, x: jax.Array, order: jax.Array, inverse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _sort_rows(choices, x, order, inverse), inverse


def _sort_rows_backward(choices: int, inverse: jax.Array, grad: jax.Array) -> tuple[Any, ...]:
    by_pair = grad[inverse].reshape(inverse.size // choices, choices, grad.shape[1])
    return by_pair.astype(jnp.float32).sum(axis=1).astype(grad.dtype), None, None


_sort_rows.defvjp(_sort_rows_forward, _sort_rows_backward)


@jax.custom_vjp
def _unsort_rows(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Rows back in the order of the pairs: [R, H] to [R, H]."""
    return x[inverse]


_unsort_rows.defvjp(
    lambda x, order, inverse: (_unsort_rows(x, order, inverse), order),
    lambda order, grad: (grad[order], None, None),
)
