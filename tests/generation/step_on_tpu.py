"""Writes down what the decode loop of a model hands to the compiler of a real TPU. Run as a process of its own::

    python tests/generation/step_on_tpu.py FAMILY LENGTH GENERATION FILE

It runs on the emulated device until the loop's step is compiled. From there on ops lower their kernels as they do for
GENERATION, and torch_tpu builds the program but compiles nothing. FILE gets StableHLO in which what torch_tpu was told
to donate is marked so. The model has a family's small preset's shape, with widths that kernels take.
"""

import sys
import types
from pathlib import Path
from typing import Any

import tpu_kernels
from tpu_kernels import emulation
from tpu_kernels.bench.presets import PRESETS

BATCH, PROMPT, TOKENS = 8, 16, 33
WIDTHS = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"moe_intermediate_size": 256},
    "gpt-oss": {"intermediate_size": 256, "head_dim": 64, "sliding_window": 128},
    "gemma4": {"moe_intermediate_size": 256, "head_dim": 256, "global_head_dim": 512, "sliding_window": 512},
}


class _Written(Exception):
    """The program is there, and nobody compiles it."""


def build_model(family: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    preset = PRESETS[family]
    config = AutoConfig.for_model(preset.model_type, **{**preset.settings, **WIDTHS, **OF_FAMILY[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    model.generation_config = GenerationConfig()
    model = model.to("tpu")
    tpu_kernels.enable(model, attention=True)
    return model


def write(family: str, length: int, generation: str, path: Path) -> None:
    import torch
    from torch_tpu._internal.compile import tpu_torch_compile

    from tpu_kernels.generation import programs
    from tpu_kernels.ops.target import Target

    def build(*, result_tensors: Any, argument_tensors: Any, donated_inputs: list[int], **_: Any) -> Any:
        module = tpu_torch_compile.build_mlir(
            result_tensors=result_tensors, argument_tensors=argument_tensors, use_stablehlo_bounds=False
        )
        if donated_inputs:
            artifact = tpu_torch_compile.serialize_mlir_portable_artifact(module)
            path.write_bytes(_marked(artifact, donated_inputs))
            raise _Written
        # The body of a loop, which becomes a part of the program.
        return types.SimpleNamespace(module=module, executable=None)

    def make_decode(*arguments: Any) -> Any:
        for name, module in list(sys.modules.items()):
            if name.endswith(("tpu_kernels.ops.tpu", ".tpu_ops.tpu")):
                module.current_target = lambda: Target(generation)
        tpu_torch_compile.traverse_and_compile = build
        return made(*arguments)

    model = build_model(family)
    made, programs.make_decode = programs.make_decode, make_decode
    ids = torch.randint(3, 250, (BATCH, PROMPT))
    cache = tpu_kernels.StaticCache(model.config, length)
    try:
        tpu_kernels.generate(
            model, ids, past_key_values=cache, max_new_tokens=TOKENS, do_sample=False, attention_mask=ids > 0
        )
    except Exception:
        if not path.exists():
            raise


def _marked(artifact: bytes, donated: list[int]) -> bytes:
    from jax.interpreters import mlir
    from jaxlib.mlir.dialects import stablehlo

    with mlir.make_ir_context() as context:
        module = stablehlo.deserialize_portable_artifact(context, artifact)
        [main] = (function for function in module.body.operations if function.name.value == "main")
        marks = list(main.arg_attrs)
        for place in donated:
            marks[place] = mlir.ir.DictAttr.get({"jax.buffer_donor": mlir.ir.BoolAttr.get(True)})
        main.arg_attrs = mlir.ir.ArrayAttr.get(marks)
        return bytes(stablehlo.serialize_portable_artifact_str(str(module), stablehlo.get_current_version()))


if __name__ == "__main__":
    emulation.install()
    write(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
