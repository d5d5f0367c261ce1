"""The kernel's functions as JAX sees them: arrays in, arrays out, differentiable.

Axis letters: M rows, K contraction, N columns, G groups, S group sizes; for experts T tokens, k choices a
token, E experts, H hidden size, I intermediate size, R = T * k pairs of a token and an expert.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from . import quantised
from .epilogue import Epilogue
from .forward import PLAIN, gmm
from .forward_tiles import Product, interpreted_config
from .quantised import dequantise, is_mxfp4, packed_depth
from .tiles import LANES, SUBLANES, Config, round_up, row_tile
from .tpu_ops import tables
from .weight_gradient import gmm_weights
from .weight_tiles import WeightProduct, interpreted_weight_config

# Minor axes are padded to these multiples: the compiler handles 64, half a register row, by itself. An axis that
# may have to be split into tiles is padded to whole register rows.
NATIVE_MULTIPLE = 64
LONG_AXIS, LONG_MULTIPLE = 8192, 128


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None = None,
    bias: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    *,
    transpose_rhs: bool = False,
    preferred_element_type: Any = None,
    activation: str | None = None,
    gating: str | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    tpu: str = "v6e",
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Multiplies each group of consecutive rows of `lhs` with the weights of its group.

    Bias, activation and gate are applied in f32 before the result leaves vector memory.

    Args:
      lhs: [M, K], bf16 or f32; the rows of group 0 first, then those of group 1, and so on.
      rhs: [G, K, N], or [G, N, K] with `transpose_rhs`; the dtype of `lhs`, or int8, or the words of
        `quantised.pack_mxfp4`.
      group_sizes: [S] int32, rows of each group. Their sum may be less than M.
      group_offset: scalar or [1] int32. `rhs` holds the weights of groups offset to offset+G-1 of the S; the
        rows of all others come out as zeros. None: S == G.
      bias: [G, N], added to the rows of its group.
      rhs_scale: of quantised weights: for int8 [G, N] or [G, B, N] f32, where each of B parts of K, multiples of 128,
        has its own; or the exponents of `quantised.pack_mxfp4`.
      transpose_rhs: `rhs` is stored as [G, N, K].
      preferred_element_type: dtype of the result; that of `lhs` when None. Sums are kept in f32.
      activation: a name in `activations.ACTIVATIONS`; with a gate it is applied to the gate, and may also be
        `activations.CLAMPED`.
      gating: "concatenated": the first N/2 columns are the gates of the others; "interleaved": each even column is
        that of the odd one after it. None: no gate.
      alpha, limit: of `activations.CLAMPED`.
      tpu: generation that the product is cut for.
      config: how the forward product is cut, in place of what is chosen.
      interpret: as in `pallas_call`.

    Returns: [M, N], or [M, N/2] with a gate; zeros in rows past the groups.

    Example:
      >>> out = ragged_dot(jnp.ones((4, 64)), jnp.ones((2, 64, 64)), jnp.array([1, 2]), interpret=True)
      >>> out[:, 0].tolist()
      [64.0, 64.0, 64.0, 0.0]
    """
    offset = jnp.zeros(1, jnp.int32) if group_offset is None else group_offset.astype(jnp.int32).reshape(1)
    offset = jnp.clip(offset, 0, group_sizes.shape[0] - rhs.shape[0])
    out_dtype = jnp.dtype(preferred_element_type or lhs.dtype)
    epilogue = Epilogue(activation, gating, bias is not None, alpha, limit)
    static = _Static(transpose_rhs, out_dtype, epilogue, tpu, config, interpret)
    if rhs_scale is not None and rhs_scale.ndim == 2:
        rhs_scale = rhs_scale[:, None]
    return _ragged_dot(static, lhs, rhs, group_sizes.astype(jnp.int32), offset, bias, rhs_scale)


@dataclasses.dataclass(frozen=True, eq=False)
class _Static:
    """What a product is specialised for. Compared by identity: `interpret` may be an unhashable record."""

    transpose_rhs: bool
    out_dtype: Any
    epilogue: Epilogue
    tpu: str
    config: Config | None
    interpret: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged_dot(
    static: _Static,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    offset: jax.Array,
    bias: jax.Array | None,
    scale: jax.Array | None,
) -> jax.Array:
    epilogue, transpose_rhs, out_dtype = static.epilogue, static.transpose_rhs, static.out_dtype
    m, k = lhs.shape
    n = epilogue.narrow(rhs.shape[1 if transpose_rhs else 2])
    if m == 0 or n == 0:
        return jnp.zeros((m, n), out_dtype)
    if k == 0 or not _fuses(epilogue, rhs, transpose_rhs):
        return _separately(static, lhs, rhs, group_sizes, offset, bias, scale)
    k_padded, n_padded = _padded(k), n if epilogue != PLAIN else _padded(n)
    wide = n_padded * (rhs.shape[1 if transpose_rhs else 2] // n)
    if is_mxfp4(rhs):
        k_padded = packed_depth(k)
        rhs, scale = (_pad_minor(w, w.shape[1], wide) for w in (rhs, scale))
    else:
        rhs = _pad_minor(rhs, *((wide, k_padded) if transpose_rhs else (k_padded, wide)))
        scale = None if scale is None else _pad_minor(scale, scale.shape[1], wide)
    if not is_mxfp4(rhs) and stored_transposed(*rhs.shape[1:]):
        # As XLA stores it, so that the kernel's operand is the buffer itself and not a copy.
        rhs, transpose_rhs = jnp.swapaxes(rhs, 1, 2), not transpose_rhs
    if static.config is not None:
        config = static.config
    elif static.interpret is True:
        config = interpreted_config(m, k_padded, n_padded, lhs.dtype)
    else:
        product = Product(
            m,
            k_padded,
            n_padded,
            rhs.shape[0],
            group_sizes.shape[0],
            str(lhs.dtype),
            str(out_dtype),
            transpose_rhs,
            wide // n_padded,
            "" if scale is None else str(rhs.dtype),
            0 if scale is None else scale.shape[1],
        )
        config = tables.choose(product, static.tpu)
    # Copies are of whole row tiles; one copy of everything needs only whole registers.
    rows = round_up(m, SUBLANES if config.resident else row_tile(lhs.dtype))
    out = gmm(
        _pad_minor(lhs, rows, k_padded),
        rhs,
        group_sizes,
        offset,
        bias,
        scale,
        transpose_rhs=transpose_rhs,
        out_dtype=out_dtype,
        epilogue=epilogue,
        config=config,
        interpret=static.interpret,
    )
    return out[:m, :n]


def _fuses(epilogue: Epilogue, rhs: jax.Array, transpose_rhs: bool) -> bool:
    """Whether the kernel can cut these weights into the pieces that the epilogue works on."""
    if epilogue == PLAIN:
        return True
    wide = rhs.shape[1 if transpose_rhs else 2]
    if is_mxfp4(rhs):
        return epilogue.narrow(wide) % LANES == 0
    k = rhs.shape[2 if transpose_rhs else 1]
    stored_transposed_rhs = transpose_rhs != stored_transposed(*rhs.shape[1:])
    multiple = row_tile(rhs.dtype) if stored_transposed_rhs else LANES
    return k == _padded(k) and epilogue.narrow(wide) % multiple == 0


def _separately(
    static: _Static,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    offset: jax.Array,
    bias: jax.Array | None,
    scale: jax.Array | None,
) -> jax.Array:
    """The product first, then the epilogue in XLA."""
    before = _product_before(static, lhs, rhs, group_sizes, offset, scale)
    rows_of = _group_of_rows(group_sizes, offset, rhs.shape[0], lhs.shape[0])
    return _epilogue_of(static, before, bias, rows_of)


def _product_before(
    static: _Static,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    offset: jax.Array,
    scale: jax.Array | None = None,
) -> jax.Array:
    """The product that the epilogue is applied to, in f32."""
    if lhs.shape[1] == 0:
        return jnp.zeros((lhs.shape[0], rhs.shape[1 if static.transpose_rhs else 2]), jnp.float32)
    plain = dataclasses.replace(static, epilogue=PLAIN, out_dtype=jnp.dtype(jnp.float32), config=None)
    return _ragged_dot(plain, lhs, rhs, group_sizes, offset, None, scale)


def _epilogue_of(static: _Static, before: jax.Array, bias: jax.Array | None, rows_of: jax.Array) -> jax.Array:
    """Bias, activation and gate of whole rows; zeros in the rows of no group."""
    groups = 0 if bias is None else bias.shape[0]
    if bias is not None:
        before = before + bias.astype(jnp.float32)[jnp.clip(rows_of, 0, groups - 1)]
    out = static.epilogue.whole(before)
    return jnp.where((rows_of >= 0)[:, None], out, 0).astype(static.out_dtype)


def _group_of_rows(group_sizes: jax.Array, offset: jax.Array, groups: int, m: int) -> jax.Array:
    """For each row the group that it is in, counted from `offset`; -1 where its weights are not here."""
    ends = jnp.cumsum(jnp.maximum(group_sizes, 0))
    group = jnp.searchsorted(ends, jnp.arange(m), side="right", method="compare_all") - offset[0]
    return jnp.where((group >= 0) & (group < groups) & (jnp.arange(m) < ends[-1]), group, -1)


def _forward(static: _Static, *operands: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    return _ragged_dot(static, *operands), operands


def _backward(static: _Static, operands: tuple[Any, ...], grad: jax.Array) -> tuple[Any, ...]:
    lhs, rhs, group_sizes, offset, bias, scale = operands
    if scale is not None:
        return _backward_of_quantised(static, operands, grad)
    grad_bias = None
    if static.epilogue != PLAIN:
        # What the epilogue was applied to was not kept: it is made again.
        before = _product_before(static, lhs, rhs, group_sizes, offset)
        rows_of = _group_of_rows(group_sizes, offset, rhs.shape[0], lhs.shape[0])
        _, pullback = jax.vjp(lambda x: _epilogue_of(static, x, bias, rows_of), before)
        (grad,) = pullback(grad)
        if bias is not None:
            of_group = rows_of == jnp.arange(rhs.shape[0])[:, None]
            # Rows of no group may hold anything.
            inside = jnp.where((rows_of >= 0)[:, None], grad, 0)
            grad_bias = jnp.dot(of_group.astype(jnp.float32), inside, precision="highest").astype(bias.dtype)
    grad = grad.astype(lhs.dtype)
    through = dataclasses.replace(
        static, transpose_rhs=not static.transpose_rhs, out_dtype=lhs.dtype, epilogue=PLAIN, config=None
    )
    grad_lhs = _ragged_dot(through, grad, rhs, group_sizes, offset, None, None)
    left, right = (grad, lhs) if static.transpose_rhs else (lhs, grad)
    grad_rhs = _weight_gradient(static, left, right, group_sizes, offset, rhs)
    return grad_lhs, grad_rhs, None, None, grad_bias, None


def _backward_of_quantised(static: _Static, operands: tuple[Any, ...], grad: jax.Array) -> tuple[Any, ...]:
    """The gradient through weights of which XLA makes floats first: of rows, bias and float scales."""
    lhs, rhs, group_sizes, offset, bias, scale = operands
    plain = dataclasses.replace(static, config=None)
    fixed = is_mxfp4(rhs)

    def product(lhs: jax.Array, bias: jax.Array | None, *scales: jax.Array) -> jax.Array:
        values = dequantise(rhs, *scales or (scale,), k=lhs.shape[1], transposed=static.transpose_rhs)
        return _ragged_dot(plain, lhs, values.astype(lhs.dtype), group_sizes, offset, bias, None)

    _, pullback = jax.vjp(product, lhs, bias, *([] if fixed else [scale]))
    grad_lhs, grad_bias, *grad_scale = pullback(grad)
    return grad_lhs, None, None, None, grad_bias, None if fixed else grad_scale[0]


_ragged_dot.defvjp(_forward, _backward)


def _weight_gradient(
    static: _Static,
    left: jax.Array,
    right: jax.Array,
    group_sizes: jax.Array,
    offset: jax.Array,
    rhs: jax.Array,
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
    if static.interpret is True:
        config = interpreted_weight_config(m, a_padded, b_padded, rhs.dtype)
    else:
        sizes = group_sizes.shape[0]
        product = WeightProduct(m, a_padded, b_padded, groups, sizes, str(rhs.dtype))
        config = tables.choose(product, static.tpu)
    rows = round_up(m, row_tile(left.dtype))
    out = gmm_weights(
        _pad_minor(left, rows, a_padded),
        _pad_minor(right, rows, b_padded),
        group_sizes,
        offset,
        groups=groups,
        out_dtype=rhs.dtype,
        config=config,
        interpret=static.interpret,
    )
    return (jnp.swapaxes(out, 1, 2) if swap else out)[:, :a, :b]


def _padded(size: int) -> int:
    return round_up(size, NATIVE_MULTIPLE if size <= LONG_AXIS else LONG_MULTIPLE)


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


def pack_mxfp4(
    blocks: jax.Array, scales: jax.Array, *, tpu: str = "v6e", interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """MXFP4 weights as the kernels read them: see `quantised.pack_mxfp4`, which is the same on every machine."""
    return quantised.pack_mxfp4(blocks, scales)


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
    product = functools.partial(ragged_dot, transpose_rhs=not transposed, tpu=tpu, interpret=interpret)

    def layer(rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
        inner = product(rows, gate_up_proj, group_sizes, activation=activation, gating="concatenated")
        return product(inner, down_proj, group_sizes)

    return routed(hidden_states, top_k_index, top_k_weights, gate_up_proj.shape[0], layer)


def routed(
    hidden_states: jax.Array,
    top_k_index: jax.Array,
    top_k_weights: jax.Array,
    experts: int,
    layer: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Each token through `layer` once for each of its k experts, summed by weight in f32: [T, H].

    Args:
      hidden_states, top_k_index, top_k_weights: as in `experts`.
      experts: E.
      layer: from rows [R, H] sorted by expert, and the E group sizes, to results [R, H]; zeros in rows past the groups.
    """
    tokens, choices = top_k_index.shape
    expert = top_k_index.reshape(-1).astype(jnp.int32)
    # Sentinels sort last and are in no group.
    order = jnp.argsort(expert, stable=True)
    inverse = jnp.argsort(order)
    group_sizes = jnp.sum(expert[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    out = permute(layer(_sort_rows(choices, hidden_states, order, inverse), group_sizes), inverse, order)
    weighted = out.reshape(tokens, choices, out.shape[1]).astype(jnp.float32) * top_k_weights[
        ..., None
    ].astype(jnp.float32)
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
def permute(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """``x[order]``, the rows of `x` in another order; `inverse` is the inverse permutation."""
    return x[order]


permute.defvjp(
    lambda x, order, inverse: (permute(x, order, inverse), inverse),
    lambda inverse, grad: (grad[inverse], None, None),
)
