import jax
import jax.numpy as jnp
import torch
from torch_tpu._internal.pallas import jax_op

from ._ops import add_op_namespace_prefix
from .ragged_dot import grouped


@jax_op(add_op_namespace_prefix("experts"))
def _experts(
    hidden: jax.Array, index: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array
) -> jax.Array:
    tokens, choices = index.shape
    order = jnp.argsort(index.reshape(-1), stable=True)
    sizes = jnp.bincount(index.reshape(-1), length=gate_up.shape[0]).astype(jnp.int32)
    gate, up = jnp.split(grouped(hidden[order // choices], gate_up, sizes), 2, axis=-1)
    rows = grouped(jax.nn.silu(gate) * up, down, sizes)
    rows = rows[jnp.argsort(order)].reshape(tokens, choices, -1)
    return jnp.sum(rows * weights[..., None], axis=1).astype(hidden.dtype)


def experts_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    if type(self.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        raise NotImplementedError(f"the activation is {type(self.act_fn).__name__}, not SiLU")
    return _experts(
        hidden_states,
        top_k_index.to(torch.int32),
        top_k_weights.to(hidden_states.dtype),
        self.gate_up_proj,
        self.down_proj,
    )
