"""transformers' MXFP4 checkpoints, gpt-oss's, for the experts kernel: their four bits a weight are kept.

Without a GPU transformers makes bfloat16 of them. A model that is loaded with the kernel's experts gets what is stored
instead, packed for the kernel tensor by tensor. Saved, it has the packed ones, which load as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ..hub import get_kernel
from ..log import warn_once
from .transformers import EXPERTS, EXPERTS_KERNELS

METHOD = "mxfp4"
WEIGHTS = ("gate_up_proj", "down_proj")
# Numbers along the contraction that share an exponent, and bytes that hold them.
BLOCK, BLOCK_BYTES = 32, 16


def register() -> None:
    """Makes models with the kernel's experts keep MXFP4; all others load as before."""
    AUTO_QUANTIZER_MAPPING[METHOD] = KeepingQuantizer


def unregister() -> None:
    """Undoes `register`."""
    AUTO_QUANTIZER_MAPPING[METHOD] = Mxfp4HfQuantizer


class KeepingQuantizer(Mxfp4HfQuantizer):  # type: ignore[misc]
    """transformers' own, except for a model whose experts the kernel computes."""

    keeps = False

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        # Put off to `update_attn_implementation`, which is the first to have the config: who computes the experts.
        self._environment = args, kwargs

    def update_attn_implementation(self, config: Any) -> Any:
        chosen = config.get_text_config()._experts_implementation
        wanted = self.pre_quantized and chosen == EXPERTS and not self.quantization_config.dequantize
        self.keeps = wanted and _can_pack()
        if not self.keeps:
            args, kwargs = self._environment
            super().validate_environment(*args, **kwargs)
        return super().update_attn_implementation(config)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        if not self.keeps:
            super()._process_model_before_weight_loading(model, **kwargs)
            return
        kept_whole = self.get_modules_to_not_convert(
            model, self.quantization_config.modules_to_not_convert, model._keep_in_fp32_modules
        )
        for name, module in model.named_modules():
            if isinstance(module, GptOssExperts) and should_convert_module(name, kept_whole):
                _kernel().use_mxfp4(module, *(_stored_like(getattr(module, name)) for name in WEIGHTS))

    def update_parallel_plan(self, model: Any, plan: dict[str, str]) -> None:
        super().update_parallel_plan(model, plan)
        if self.keeps:
            split = {f"{name}_scale": style for name, style in plan.items() if name.endswith(WEIGHTS)}
            plan.update(split)

    def get_weight_conversions(self) -> list[Any]:
        if not self.keeps:
            conversions: list[Any] = super().get_weight_conversions()
            return conversions
        return _packing(self)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        super()._process_model_after_weight_loading(model, **kwargs)
        if self.keeps:
            # What is saved stays packed.
            model._weight_conversions = [c for c in model._weight_conversions if not _packs(c)]

    def get_state_dict_and_metadata(self, model: Any) -> Any:
        return (None, {}) if self.keeps else super().get_state_dict_and_metadata(model)


class Pack(ConversionOps):  # type: ignore[misc]
    """A weight's blocks and scales to the kernel's words and exponents."""

    supports_many_to_many = True

    def __init__(self, hf_quantizer: KeepingQuantizer | None) -> None:
        # By this attribute transformers knows that tensors must come as they are stored.
        self.hf_quantizer = hf_quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """The packed tensors by name."""
        stored = (input_dict[name] for name in source_patterns)
        blocks, scales = (one[0] if isinstance(one, list) else one for one in stored)
        return dict(zip(target_patterns, _kernel().pack_mxfp4(blocks, scales), strict=True))


def _packing(quantizer: KeepingQuantizer | None) -> list[Any]:
    return [
        WeightConverter([f"{name}_blocks", f"{name}_scales"], [name, f"{name}_scale"], [Pack(quantizer)])
        for name in WEIGHTS
    ]


def _can_pack() -> bool:
    """Whether this version of transformers makes two tensors of two as it loads them; the log says if not."""
    try:
        _packing(None)
    except ValueError:
        warn_once(
            f"transformers {transformers.__version__} cannot pack MXFP4 weights as it loads them: they become "
            "bfloat16; 5.24 can"
        )
        return False
    return True


def _packs(conversion: Any) -> bool:
    return any(isinstance(operation, Pack) for operation in getattr(conversion, "operations", ()))


def _kernel() -> Any:
    repo_id, version = EXPERTS_KERNELS[0]
    return get_kernel(repo_id, version=version)


def _stored_like(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty blocks and scales of a weight [E, K, N], on its device."""
    experts, k, n = weight.shape
    scales = weight.new_empty((experts, n, k // BLOCK), dtype=torch.uint8)
    return scales.new_empty((*scales.shape, BLOCK_BYTES)), scales
