"""Exports a model's decode step. Run as a process of its own, as torch_tpu needs a device, which is emulated here::

    python -m tpu_kernels.projection.worker FOLDER

FOLDER has `request.json` (`records.Request`); `answer.json` and the programs go there too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ..errors import TpuKernelsError
from .records import PUBLISHED, Answer, Arm, Experts, LayerKind, Part, Request

OUR_EXPERTS = ("tpu_fused_experts", "tpu_ragged_dot")
OUR_ATTENTION = "tpu_attention"


def answer(request: Request, folder: Path) -> Answer:
    """Exports what is requested to files in `folder`."""
    import torch
    from transformers import AutoModelForCausalLM

    from .layers import Ends, layer_kinds
    from .plan import ParallelPlan
    from .sharding import shard

    config = _config(request.config)
    dtype = config.dtype or torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    kinds = layer_kinds(model)
    experts = _experts(model, config)
    kernels = _register(request.arms)
    collectives = shard(model, ParallelPlan(request.tp, request.ep))
    exporter = _Exporter(folder, kernels)
    refused: list[tuple[Arm, str]] = []
    for arm in request.arms:
        if reason := _switch(model, arm, experts):
            refused.append((arm, reason))
            continue
        for batch in request.batches:
            for kind in kinds:
                exporter.add_layer(model, kind, arm, batch, request.context)
    for batch in request.batches:
        exporter.add(None, None, batch, Ends(model, batch=batch))
    in_layers = {kind.name: f"layers.{kind.index}." for kind in kinds}
    return Answer(
        model=type(model).__name__,
        parameters=parameters,
        layers=tuple(kinds),
        weights={
            "": (sum(p.nbytes for p in _at_the_ends(model)), 0),
            **{kind.name: _weights(model.base_model.layers[kind.index]) for kind in kinds},
        },
        collectives={
            "": tuple(c for c in collectives if "layers." not in c.module),
            **{name: tuple(c for c in collectives if path in c.module) for name, path in in_layers.items()},
        },
        experts=experts,
        refused=tuple(refused),
        parts=tuple(exporter.parts),
    )


class _Exporter:
    """Writes programs to a folder."""

    def __init__(self, folder: Path, kernels: dict[str, tuple[str, int] | None]) -> None:
        self._folder, self._kernels = folder, kernels
        self.parts: list[Part] = []

    def add_layer(self, model: Any, kind: LayerKind, arm: Arm, batch: int, context: int) -> None:
        from .layers import Layer

        self.add(kind.name, arm, batch, Layer(model, kind, batch=batch, context=context))

    def add(self, kind: str | None, arm: Arm | None, batch: int, module: Any) -> None:
        from .export import export

        program, calls = export(module, self._kernels)
        file = f"{len(self.parts)}.stablehlo"
        (self._folder / file).write_bytes(program)
        cache = sum(tensor.nbytes for tensor in module.donated)
        self.parts.append(Part(kind=kind, arm=arm, batch=batch, file=file, cache_bytes=cache, calls=calls))


def _config(values: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**values)


def _experts(model: Any, config: Any) -> Experts | None:
    from ..integrations.transformers import is_dispatched

    modules = [module for module in model.modules() if is_dispatched(module)]
    if not modules:
        return None
    names = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "num_experts_per_token")
    top_k = next(value for name in names if (value := getattr(config, name, None)))
    return Experts(count=modules[0].num_experts, top_k=top_k)


def _weights(layer: Any) -> tuple[int, int]:
    from ..integrations.transformers import is_dispatched

    of_experts = {id(p) for module in layer.modules() if is_dispatched(module) for p in module.parameters()}
    sizes = {True: 0, False: 0}
    for parameter in layer.parameters():
        sizes[id(parameter) in of_experts] += parameter.nbytes
    return sizes[False], sizes[True]


def _at_the_ends(model: Any) -> list[Any]:
    ends = (model.base_model.norm, model.get_output_embeddings())
    return [parameter for module in ends for parameter in module.parameters()]


def _register(arms: tuple[Arm, ...]) -> dict[str, tuple[str, int] | None]:
    """Makes the arms known to transformers; the kernels whose ops are cut out, by their namespace."""
    from transformers.integrations.moe import ExpertsInterface

    from .. import enable
    from ..hub import get_loaded_kernels
    from . import composed

    ExpertsInterface.register(PUBLISHED, composed.experts_forward)
    kernels: dict[str, tuple[str, int] | None] = {composed.NAMESPACE: None}
    attention = any(arm.attention == OUR_ATTENTION for arm in arms)
    experts = any(arm.experts in OUR_EXPERTS for arm in arms)
    if experts or attention:
        enable(experts=experts, attention=attention)
    for kernel in get_loaded_kernels():
        ops = [value for value in vars(kernel.module).values() if hasattr(value, "jax_fn")]
        if kernel.repo_id is not None and ops:
            kernels[ops[0].name.partition("::")[0]] = (kernel.repo_id, kernel.version)
    return kernels


def _switch(model: Any, arm: Arm, experts: Experts | None) -> str | None:
    """Switches the model to an arm; why that does not serve it, if so."""
    from ..integrations.transformers import is_dispatched
    from . import composed

    if experts is not None:
        if arm.experts == PUBLISHED:
            [first, *_] = (module for module in model.modules() if is_dispatched(module))
            if reason := composed.refusal(first):
                return reason
        model.set_experts_implementation(arm.experts)
    model.set_attn_implementation(arm.attention)
    return None


def main() -> None:
    folder = Path(sys.argv[1])
    from .. import emulation

    try:
        emulation.install()
        request = Request.model_validate_json((folder / "request.json").read_text(encoding="utf-8"))
        result = answer(request, folder)
    except TpuKernelsError as error:
        result = Answer(error=str(error))
    (folder / "answer.json").write_text(result.model_dump_json(), encoding="utf-8")


if __name__ == "__main__":
    main()
