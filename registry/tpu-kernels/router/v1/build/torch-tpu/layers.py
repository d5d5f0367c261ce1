"""The layer that takes the place of transformers' routers; the model's module keeps its parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from .ops import route


class SoftmaxTopKRouter(torch.nn.Module):
    """The router of Qwen3.5-MoE, and of Laguna, which has the same name there but scores by sigmoids."""

    has_backward = True
    can_torch_compile = True

    weight: Tensor
    hidden_dim: int
    top_k: int

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        logits = torch.nn.functional.linear(hidden_states, self.weight)
        bias = getattr(self, "e_score_correction_bias", None)
        if bias is None:
            weights, index = route(logits, top_k=self.top_k)
        else:
            logits = logits.float()
            cap = self.router_logit_softcapping
            if cap > 0.0:
                logits = torch.tanh(logits / cap) * cap
            weights, index = route(logits, bias, top_k=self.top_k, scoring_func="sigmoid")
        return logits, weights.to(hidden_states.dtype), index.long()
