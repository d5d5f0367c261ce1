"""What models call: an experts function for transformers."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .kernel import MOST_HIDDEN, MOST_TOKENS
from .ops import experts


class Path(NamedTuple):
    """How a module's experts are computed: by the kernel, or by the model's "own" code; and why not by the kernel."""

    name: str
    reason: str = ""


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of a transformers module, by the kernel where it can."""
    if explain(self).name == "own" or hidden_states.shape[0] > MOST_TOKENS:
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    return experts(hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj)


def explain(module: Any) -> Path:
    """The path that a module takes, for the report of `tpu_kernels.enable`."""
    if not module.has_gate or module.has_bias or module.is_transposed:
        return Path("own", "the kernel has gated experts without bias only, stored as [E, 2I, H]")
    if type(module.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        return Path("own", f"its activation is {type(module.act_fn).__name__}, and the kernel's is SiLU")
    if module.down_proj.shape[1] > MOST_HIDDEN:
        return Path("own", f"its hidden size is above {MOST_HIDDEN}")
    return Path("fused")


experts_forward.explain = explain  # type: ignore[attr-defined]
