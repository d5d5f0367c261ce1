"""``tpu-kernels warm``: compile a model's decode loop ahead."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.table import Table

from ..bench.placement import place
from ..bench.results import DeviceChoice
from .output import whole_numbers


def warm(
    model: Annotated[str, typer.Argument(help="A Hub id, a folder or preset:NAME.")],
    batch: Annotated[str, typer.Option(help="Batch sizes in sequences, comma-separated.")] = "1",
    prompt: Annotated[str, typer.Option(help="Lengths of prompts in tokens, comma-separated.")] = "128",
    length: Annotated[
        str, typer.Option(help="Tokens of prompt and answer together, comma-separated.")
    ] = "1024",
    sample: Annotated[
        bool | None, typer.Option(help="Sampling or greedy; as the checkpoint says unless given.")
    ] = None,
    attention: Annotated[bool, typer.Option(help="With the attention kernel.")] = False,
    device: Annotated[str, typer.Option(help="auto, tpu, emulated or cpu.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32 or bfloat16.")] = "auto",
    cache: Annotated[
        Path | None,
        typer.Option(help="Where compiled programs are kept; TPU_KERNELS_CACHE/xla unless given."),
    ] = None,
) -> None:
    """Compile a model's decode loop ahead, for batch sizes and lengths, and keep what the compiler made.

    A process that is to find it needs the variable that is printed at the end, set before it imports torch.

    Example: tpu-kernels warm Qwen/Qwen3-30B-A3B --batch 1,8 --prompt 128,512 --length 2048
    """
    from ..analysis.cache import cache_folder

    batches, prompts, lengths = (
        whole_numbers(name, items)
        for name, items in (("batch", batch), ("prompt", prompt), ("length", length))
    )
    # Read when torch_tpu loads. The module that has the name imports torch.
    variable = "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"
    folder = (cache or Path(os.environ.get(variable) or cache_folder("xla"))).expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[variable] = str(folder)
    placement = place(cast(DeviceChoice, device))

    from ..bench.subject import load_model
    from ..generation.warm import warm as compile_ahead
    from ..integrations.transformers import enable

    loaded = load_model(model, dtype, placement.torch_device)
    report = enable(loaded, attention=attention)
    options = {} if sample is None else {"do_sample": sample}
    compilations = compile_ahead(loaded, batches=batches, prompts=prompts, lengths=lengths, **options)
    table = Table(title=f"{model} on {placement.description}")
    for column in ("step", "batch", "tokens", "cache", "seconds", "compiled because"):
        table.add_column(
            column, justify="right" if column in ("batch", "tokens", "cache", "seconds") else "left"
        )
    for one in compilations:
        key = one.key
        numbers = (key.batch, key.tokens, key.cache_length)
        table.add_row(key.step, *map(str, numbers), f"{one.seconds:.1f}", one.cause)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(str(report), markup=False)
    console.print(table)
    console.print(f"{len(compilations)} graphs. To find them again: {variable}={folder}", markup=False)
