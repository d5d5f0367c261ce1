"""A float64 oracle in numpy, loops and all, and layers to try it on."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from moe_experts.ragged_dot.quantised import dequantise, pack_mxfp4

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def f64(x) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(jnp.float32)).astype(np.float64)


def _erf(x: np.ndarray) -> np.ndarray:
    return f64(jax.lax.erf(jnp.asarray(x, jnp.float32)))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(x / 2))


ACTIVATIONS = {
    "gelu": lambda x, _: 0.5 * x * (1 + _erf(x / np.sqrt(2))),
    "gelu_tanh": lambda x, _: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x, _: np.maximum(x, 0),
    "relu2": lambda x, _: np.maximum(x, 0) ** 2,
    "silu": lambda x, alpha: x * _sigmoid(alpha * x),
}


def fused_experts(
    hidden_states,
    top_k_index,
    top_k_weights,
    gate_up_proj,
    down_proj,
    gate_up_bias=None,
    down_bias=None,
    gate_up_scale=None,
    down_scale=None,
    shared_gate_up=None,
    shared_down=None,
    shared_weights=None,
    *,
    transposed=False,
    activation="silu",
    gated=True,
    interleaved=False,
    alpha=1.0,
    limit=None,
    up_offset=0.0,
) -> np.ndarray:
    x, weights, into, back = (f64(a) for a in (hidden_states, top_k_weights, gate_up_proj, down_proj))
    if gate_up_scale is not None and gate_up_scale.dtype == jnp.uint8:
        inner = gate_up_proj.shape[2] // (2 if gated else 1)
        into, back = (
            f64(dequantise(weights, scale, k=k, transposed=False))
            for weights, scale, k in (
                (gate_up_proj, gate_up_scale, x.shape[1]),
                (down_proj, down_scale, inner),
            )
        )
    elif gate_up_scale is not None:
        into = into * f64(np.expand_dims(gate_up_scale, 1 if transposed else 2))
        back = back * f64(np.expand_dims(down_scale, 1 if transposed else 2))
    index = np.asarray(top_k_index)
    act = ACTIVATIONS[activation]
    biases = (gate_up_bias, down_bias)

    def expert(state, into, back, into_bias, back_bias):
        inner = state @ (into if transposed else into.T)
        inner = inner if into_bias is None else inner + into_bias
        if gated:
            gate, up = (inner[::2], inner[1::2]) if interleaved else np.split(inner, 2)
            if limit is not None:
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            inner = act(gate, alpha) * (up + up_offset)
        else:
            inner = act(inner, alpha)
        result = inner @ (back if transposed else back.T)
        return result if back_bias is None else result + back_bias

    out = np.zeros_like(x)
    for token, choice in np.ndindex(*index.shape):
        e = index[token, choice]
        if not 0 <= e < len(into):
            continue
        result = expert(x[token], into[e], back[e], *(None if b is None else f64(b)[e] for b in biases))
        out[token] += weights[token, choice] * result
    if shared_gate_up is not None:
        scale = 1 if shared_weights is None else f64(shared_weights)[:, None]
        out += scale * np.stack(
            [expert(token, f64(shared_gate_up), f64(shared_down), None, None) for token in x]
        )
    return out


def relative_l2(actual, expected: np.ndarray) -> float:
    actual = f64(actual)
    assert actual.shape == expected.shape
    norm = np.linalg.norm(expected)
    return float(np.linalg.norm(actual - expected) / norm) if norm else float(np.abs(actual).max(initial=0))


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer with random numbers: the operands, and the keywords that say what they are."""

    operands: tuple[jax.Array | None, ...]
    form: dict[str, Any]

    def expected(self) -> np.ndarray:
        return fused_experts(*self.operands, **self.form)


def layer(
    index: np.ndarray,
    *,
    experts: int,
    hidden: int,
    intermediate: int,
    dtype: str = "float32",
    routing: str = "float32",
    biased: bool = False,
    quantised: str | None = None,
    shared: int = 0,
    seed: int = 0,
    **form: Any,
) -> Layer:
    """A layer whose experts without tokens are poisoned: NaN and inf in weights and biases.

    Args:
      quantised: "int8" or "mxfp4".
      shared: the intermediate size of a shared expert; 0: there is none.
    """
    rng = np.random.default_rng(seed)
    transposed = form.get("transposed", False)
    rows = intermediate * (2 if form.get("gated", True) else 1)
    idle = [e for e in range(experts) if not (index == e).any()]

    def normal(*shape: int, scale: float = 1.0, poison: float = np.nan) -> jax.Array:
        values = rng.standard_normal((experts, *shape)) * scale
        values[idle] = poison
        return jnp.asarray(values, dtype)

    into, back = (rows, hidden), (hidden, intermediate)
    weights = (
        normal(*(into[::-1] if transposed else into), scale=hidden**-0.5),
        normal(*(back[::-1] if transposed else back), scale=intermediate**-0.5),
    )
    scales = ()
    if quantised == "mxfp4":
        packed = []
        for n, k in ((rows, hidden), (hidden, intermediate)):
            blocks = rng.integers(0, 256, (experts, n, k // 32, 16), np.uint8)
            exponents = rng.integers(118, 123, (experts, n, k // 32)).astype(np.uint8)
            exponents[idle] = 252  # the largest numbers there are
            packed.append(pack_mxfp4(jnp.asarray(blocks), jnp.asarray(exponents)))
        weights, scales = zip(*packed, strict=True)
    if quantised == "int8":
        # Scales of every order; those of experts without tokens are poisoned as weights are.
        scales = tuple(
            jnp.asarray(np.where(np.isin(np.arange(experts), idle)[:, None], np.nan, rng.lognormal(size=(experts, n))))
            .astype(jnp.float32) * length**-0.5 / 60
            for n, length in ((rows, hidden), (hidden, intermediate))
        )  # fmt: skip
        weights = tuple(jnp.asarray(rng.integers(-127, 128, weight.shape), jnp.int8) for weight in weights)
    biases = (normal(rows, poison=np.inf), normal(hidden)) if biased else ()
    if scales and not biases:
        biases = (None, None)
    states = jnp.asarray(rng.standard_normal((len(index), hidden)), dtype)
    routed = jnp.asarray(rng.random(index.shape), routing)
    operands = (states, jnp.asarray(index, jnp.int32), routed, *weights, *biases, *scales)
    if shared:
        into, back = (shared * rows // intermediate, hidden), (hidden, shared)
        own = (
            rng.standard_normal(axes[::-1] if transposed else axes) * axes[1] ** -0.5 for axes in (into, back)
        )
        share = jnp.asarray(rng.random(len(index)), routing)
        operands += (None,) * (9 - len(operands)) + (*(jnp.asarray(w, dtype) for w in own), share)
    return Layer(operands, form)
