"""The published composition of experts, as a stand-in: sort, two grouped matmuls by a Pallas kernel, sort back.

That is what kernels-community/ragged-dot-tpu does, with a grouped matmul of tokamax. In its place is the one that jax
brings (megablox), which tokamax's first was made from: installed wherever jax is.
"""

from __future__ import annotations

from typing import Any

import torch

NAMESPACE = "tpu_kernels_projection"


@torch.library.custom_op(f"{NAMESPACE}::grouped_matmul", mutates_args=())
def grouped_matmul(rows: torch.Tensor, weights: torch.Tensor, group_sizes: torch.Tensor) -> torch.Tensor:
    """Rows [M, K] in groups times weights [G, N, K]: [M, N]. Only its shapes are used: it is cut out of programs."""
    raise NotImplementedError("grouped_matmul is a mark in exported programs")


@grouped_matmul.register_fake
def _(rows: torch.Tensor, weights: torch.Tensor, group_sizes: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])


def refusal(experts: Any) -> str | None:
    """Why the published kernel does not serve a module; None where it does."""
    if experts.has_bias or experts.is_transposed or not experts.has_gate:
        return "the published kernel serves gated experts without bias, stored [E, N, K], only"
    return None


def experts_forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """An experts function of transformers."""
    tokens, choices = top_k_index.shape
    expert = top_k_index.reshape(-1)
    order = torch.argsort(expert, stable=True)
    inverse = torch.argsort(order)
    numbers = torch.arange(self.num_experts, device=expert.device)
    sizes = (expert[:, None] == numbers).sum(0, dtype=torch.int32)
    inner = self._apply_gate(grouped_matmul(hidden_states[order // choices], self.gate_up_proj, sizes))
    out = grouped_matmul(inner, self.down_proj, sizes)[inverse].view(tokens, choices, -1)
    here = (top_k_index < self.num_experts)[..., None]
    weighted = torch.where(here, out * top_k_weights[..., None], 0)
    return weighted.sum(1).to(hidden_states.dtype)


def jax_grouped_matmul(rows: Any, weights: Any, group_sizes: Any) -> Any:
    """The same in JAX, by megablox. Rows are padded to its tile."""
    import importlib

    import jax.numpy as jnp

    # The package has a function of the module's name.
    megablox = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    m, k = rows.shape
    n = weights.shape[1]
    tile = 128 if m >= 128 else -(-m // 16) * 16
    padded = jnp.pad(rows, ((0, -m % tile), (0, 0)))
    columns = n if k * n <= 2**21 else max(128, 2**21 // k // 128 * 128)
    tiling = (tile, k if k <= 4096 else 1024, columns)
    out = megablox.gmm(padded, weights, group_sizes, jnp.bfloat16, tiling, transpose_rhs=True)
    return out[:m]
