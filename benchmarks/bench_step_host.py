"""Host time of a decode step: transformers' loop beside this library's, on the emulated device.

    python -m benchmarks.bench_step_host --layers 48 --batch 1,64

A model of Qwen3-30B-A3B's depth and number of experts, but narrow. What is measured is the difference between two
requests of different lengths, over their difference in steps: prefill, whatever it takes, is in neither. Host time is
the processor time of the thread that runs Python, which sleeps while it waits for a device: it is what carries over
to a TPU, to another host's speed. Wall time is mostly XLA:CPU's computing, and is not.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any
from unittest import mock

import typer
from rich.console import Console
from rich.table import Table

SHORT, LONG = 113, 209  # new tokens: the first comes from prefill, the others are whole dispatches
PROMPT = 32


@dataclass(frozen=True)
class Cost:
    """Of one decode step, in milliseconds."""

    host_ms: float
    wall_ms: float


def measure(run: Callable[[int], Any], repeats: int) -> Cost:
    """The cost of a step of `run`, which is given a number of new tokens: of each length the fastest run counts."""
    least = {}
    for tokens in (SHORT, LONG):
        run(tokens)  # compiles
        host, wall = zip(*(_time(run, tokens) for _ in range(repeats)), strict=True)
        least[tokens] = min(host), min(wall)
    costs = [
        1e3 * (long - short) / (LONG - SHORT) for short, long in zip(least[SHORT], least[LONG], strict=True)
    ]
    return Cost(*costs)


def _time(run: Callable[[int], Any], tokens: int) -> tuple[float, float]:
    gc.collect()
    host, wall = time.thread_time(), time.perf_counter()
    run(tokens)
    return time.thread_time() - host, time.perf_counter() - wall


def build(layers: int) -> Any:
    """Qwen3-30B-A3B with `layers` layers, 64 wide, with seeded weights, on the device."""
    import torch
    from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=128,
        num_experts_per_tok=8,
        initializer_range=0.2,
        eos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config).eval().requires_grad_(False).to("tpu")
    model.generation_config = GenerationConfig()
    return model


def arms(model: Any, batch: int) -> dict[str, Callable[[int], Any]]:
    """Requests for a number of new tokens, by the loop that serves them."""
    import torch

    import tpu_kernels
    from tpu_kernels.generation import compilation
    from tpu_kernels.generation.cache import bucket_length

    ids = torch.randint(3, 250, (batch, PROMPT), generator=torch.Generator().manual_seed(0))
    common = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_length": None}
    # One bucket, so one graph, for both lengths, in every arm.
    length = bucket_length(PROMPT + LONG)

    def stock(tokens: int) -> Any:
        return model.generate(
            ids, max_new_tokens=tokens, cache_implementation="static", max_cache_len=length, **common
        )

    def ours(tokens: int) -> Any:
        return tpu_kernels.generate(model, ids, max_new_tokens=tokens, **common)

    def public(tokens: int) -> Any:
        with mock.patch.object(compilation, "_donating_backend", return_value=None):
            return tpu_kernels.generate(model, ids, max_new_tokens=tokens, steps=1, **common)

    return {
        "transformers' loop, static cache": stock,
        "ours": ours,
        "ours, a step a dispatch, public API": public,
    }


def main(
    layers: Annotated[int, typer.Option(help="Of the model; Qwen3-30B-A3B has 48.")] = 48,
    batch: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,64",
    repeats: Annotated[int, typer.Option(help="Measurements, of which the least counts.")] = 3,
) -> None:
    """Measure the host time of a decode step."""
    from tpu_kernels import emulation

    emulation.install()
    import torch

    from tpu_kernels.generation.programs import Programs

    model = build(layers)
    table = Table(
        title=f"Decode step, {layers} layers, 128 experts, 64 wide: emulated device, host time on this CPU"
    )
    for column in ("loop", "batch", "host ms", "of stock", "wall ms", "same tokens"):
        table.add_column(column, justify="left" if column == "loop" else "right")
    for size in map(int, batch.split(",")):
        requests = arms(model, size)
        reference = None
        for name, request in requests.items():
            torch._dynamo.reset()
            vars(model).pop("_tpu_kernels_programs", None)
            cost = measure(request, repeats)
            tokens = request(SHORT)
            if reference is None:
                reference = cost, tokens
            share = f"1/{reference[0].host_ms / cost.host_ms:.1f}"
            same = "yes" if torch.equal(tokens, reference[1]) else "no"
            table.add_row(name, str(size), f"{cost.host_ms:.3f}", share, f"{cost.wall_ms:.3f}", same)
            print(
                name,
                size,
                cost,
                share,
                same,
                *map(str, Programs.of(model).compilations),
                sep="\n  ",
                flush=True,
            )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
