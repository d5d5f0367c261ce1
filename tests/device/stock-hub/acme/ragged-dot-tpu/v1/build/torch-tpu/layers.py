import torch
from torch import nn

from .experts import experts_forward


class Experts(nn.Module):
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)


__all__ = ["Experts"]
