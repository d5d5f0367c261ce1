"""The layer that takes the place of `apply_rotary_pos_emb` in transformers."""

from __future__ import annotations

import torch
from torch import Tensor

from .ops import rotary


class rotary_pos_emb(torch.nn.Module):
    """The rotation of Llama, Qwen3 and most others, and of gpt-oss, whose tables have one half only.

    Named as the function is in the mappings of stock `kernels`.
    """

    has_backward = True
    can_torch_compile = True

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        if 2 * cos.shape[-1] == q.shape[-1]:
            cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)
        return rotary(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
