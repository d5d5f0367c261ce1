"""Host time of a decode step: transformers' loop beside this library's, on the emulated device.

    python -m benchmarks.bench_step_host --layers 48 --batch 1,64

A model of Qwen3-30B-A3B's depth and number of experts, but narrow. A stopping criterion, which both loops ask after
each token, is the clock: what is measured lies between two tokens of one request, without prefill, first and last
dispatches. Host time is the processor time of the thread that runs Python, which sleeps while it waits for a device:
it is what carries over to a TPU, to another host's speed. Wall time is mostly XLA:CPU's computing, and is not.

The last rows are of a short and a long answer in the same cache: what a step costs does not grow with the length.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any
from unittest import mock

import typer
from rich.console import Console
from rich.table import Table

PROMPT, TOKENS = 32, 129
SHORT, LONG = 129, 513
FIRST, LAST = 17, -33  # of the tokens between which time is taken


@dataclass(frozen=True)
class Cost:
    """Of one decode step, in milliseconds."""

    host_ms: float
    wall_ms: float


class Clock:
    """A stopping criterion that never stops, and notes the time."""

    def __init__(self) -> None:
        self.host: list[float] = []
        self.wall: list[float] = []
        self._nothing: Any = None

    def __call__(self, ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.host.append(time.thread_time())
        self.wall.append(time.perf_counter())
        if self._nothing is None:
            self._nothing = ids.new_zeros(ids.shape[0], dtype=bool)
        return self._nothing


Run = Callable[[int, Clock], Any]
"""A request for a number of new tokens."""


def measure(run: Run, repeats: int, tokens: int = TOKENS) -> tuple[Cost, Any]:
    """The cost of a step, the fastest of several requests, and what they made."""
    made = run(tokens, Clock())  # compiles
    clocks = [Clock() for _ in range(repeats)]
    for clock in clocks:
        gc.collect()
        run(tokens, clock)
    host, wall = (
        min(times[LAST] - times[FIRST] for times in (getattr(clock, name) for clock in clocks))
        for name in ("host", "wall")
    )
    steps = tokens + LAST - FIRST
    return Cost(1e3 * host / steps, 1e3 * wall / steps), made


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


def prompts(batch: int) -> tuple[Any, dict[str, Any]]:
    """Prompts, and what else every arm's `generate` is given."""
    import torch

    ids = torch.randint(3, 250, (batch, PROMPT), generator=torch.Generator().manual_seed(0))
    return ids, {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_length": None}


def arms(model: Any, batch: int) -> dict[str, Run]:
    """Requests by the loop that serves them."""
    import tpu_kernels
    from tpu_kernels.generation import compilation
    from tpu_kernels.generation.cache import bucket_length

    ids, common = prompts(batch)
    length = bucket_length(PROMPT + TOKENS)

    def stock(tokens: int, clock: Clock) -> Any:
        options = {"cache_implementation": "static", "max_cache_len": length, **common}
        return model.generate(ids, max_new_tokens=tokens, stopping_criteria=[clock], **options)

    def ours(tokens: int, clock: Clock, **options: Any) -> Any:
        return tpu_kernels.generate(
            model, ids, max_new_tokens=tokens, stopping_criteria=[clock], **options, **common
        )

    def public(tokens: int, clock: Clock, **options: Any) -> Any:
        with mock.patch.object(compilation, "_donating_backend", return_value=None):
            return ours(tokens, clock, **options)

    return {
        "transformers' loop, static cache": stock,
        "ours": ours,
        "ours, public API": public,
        "ours, public API, a step a dispatch": functools.partial(public, steps=1),
    }


def in_one_cache(model: Any) -> Run:
    """Requests of one sequence, of any number of tokens up to the longest, so all by the same graphs."""
    import tpu_kernels

    ids, common = prompts(1)
    cache = tpu_kernels.StaticCache(model.config, PROMPT + LONG)

    def ours(tokens: int, clock: Clock) -> Any:
        cache.reset()
        options = {"past_key_values": cache, **common}
        return tpu_kernels.generate(model, ids, max_new_tokens=tokens, stopping_criteria=[clock], **options)

    return ours


def forget(model: Any) -> None:
    """Drops what was compiled for `model`, so that each arm is as if alone."""
    import torch

    torch._dynamo.reset()
    vars(model).pop("_tpu_kernels_programs", None)


def main(
    layers: Annotated[int, typer.Option(help="Of the model; Qwen3-30B-A3B has 48.")] = 48,
    batch: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,64",
    repeats: Annotated[int, typer.Option(help="Requests, of which the fastest counts.")] = 3,
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
        stock = None
        for name, run in arms(model, size).items():
            forget(model)
            cost, tokens = measure(run, repeats)
            stock = stock or (cost, tokens)
            share = f"1/{stock[0].host_ms / cost.host_ms:.1f}"
            same = "yes" if torch.equal(tokens, stock[1]) else "no"
            table.add_row(name, str(size), f"{cost.host_ms:.3f}", share, f"{cost.wall_ms:.3f}", same)
            print(name, size, cost, share, same, *Programs.of(model).compilations, sep="\n  ", flush=True)
    forget(model)
    run = in_one_cache(model)
    for length in (SHORT, LONG):
        cost, _ = measure(run, repeats, length)
        table.add_row(f"ours, {length} tokens", "1", f"{cost.host_ms:.3f}", "", f"{cost.wall_ms:.3f}", "")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
