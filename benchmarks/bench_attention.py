"""Simulated times of prefill attention and its gradient, beside jax's splash attention. No TPU is needed.

python -m benchmarks.bench_attention                                # v6e, 8K causal, 32 query and 4 kv heads
python -m benchmarks.bench_attention --tpu v5e,tpu7x --shape 32x8x8192x128,24x24x4096x64:full
python -m benchmarks.bench_attention --no-gradient

XLA's dense attention is no peer here: only Pallas kernels can be simulated. Recorded times are others', of real TPUs.
"""

from __future__ import annotations

import kernels_src.conftest  # noqa: F401  (makes the kernels' JAX side importable, without torch)

# isort: split
import dataclasses
import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any

import typer
from attention import flash
from attention.shapes import visible_pairs
from rich.console import Console
from rich.table import Table

from benchmarks.calibration.records import load_records, parse_shape
from tpu_kernels.analysis.compiler import Job
from tpu_kernels.analysis.simulator.calibration import load_calibration
from tpu_kernels.analysis.simulator.profile import Profile
from tpu_kernels.analysis.simulator.simulation import simulate_many
from tpu_kernels.errors import TpuKernelsError

RECORDED = {
    False: "pallas_mosaic_tpu_splash_attention",
    True: "pallas_mosaic_tpu_splash_attention_vjp",
}
# Of splash attention, as (block_q, block_kv, block_kv_compute); the fastest counts.
SPLASH_BLOCKS = ((1024, 1024, 1024), (2048, 2048, 512))
SPLASH_GRADIENT_BLOCKS = (1024, 512)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention layer's pass over a sequence.

    Attributes:
      heads, kv_heads, length, dim: Hq, H, L and D.
      causal: a token sees itself and those before.
    """

    heads: int
    kv_heads: int
    length: int
    dim: int
    causal: bool

    @classmethod
    def parse(cls, text: str) -> Problem:
        """Reads ``32x4x8192x128``, with ``:full`` behind it where it is not causal."""
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)(:full)?", text)
        if match is None:
            raise typer.BadParameter(f"{text!r} is no shape; give heads x kv heads x length x head dimension")
        return cls(*(int(number) for number in match.groups()[:4]), causal=match[5] is None)

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} heads, {self.length}, D {self.dim}, {'causal' if self.causal else 'full'}"

    def flops(self, gradient: bool) -> float:
        """Of the products that a pass, or its gradient, cannot do without."""
        pairs = self.heads * visible_pairs(self.length, self.length, self.causal, None)
        return 2.0 * (5 if gradient else 2) * pairs * self.dim

    def recorded_ms(self, tpu: str, gradient: bool) -> float | None:
        """The shortest of others' recorded times of splash attention for it."""
        wanted = [(self.heads, self.length, self.dim), *[(self.kv_heads, self.length, self.dim)] * 2]
        times = [
            record.median_ms
            for record in load_records()
            if (record.generation, record.op) == (tpu, RECORDED[gradient])
            and [parse_shape(record.arguments[name])[1] for name in "qkv"] == wanted
            and record.arguments["mask"]["is_causal"] == self.causal
            and not record.arguments["dropout_rate"]
        ]
        return min(times, default=None)

    def jobs(self, tpu: str, gradient: bool) -> dict[str, list[Job]]:
        """The programs that are compared; where there are several of one kernel, the fastest counts."""
        import jax

        form = {"causal": self.causal, "tpu": tpu}
        arrays = [
            jax.ShapeDtypeStruct((1, heads, self.length, self.dim), "bfloat16")
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        ]
        ours: Callable[..., Any] = partial(_ours, form)
        if not gradient:
            return {
                "ours": [Job(ours, tuple(arrays), tpu)],
                "splash": [
                    Job(self._splash(blocks), tuple(x.update(shape=x.shape[1:]) for x in arrays), tpu)
                    for blocks in SPLASH_BLOCKS
                ],
            }
        flat = [x.update(shape=x.shape[1:]) for x in arrays]
        splash = [self._splash(SPLASH_BLOCKS[0], block) for block in SPLASH_GRADIENT_BLOCKS]
        return {
            "ours": [Job(_training(ours), (*arrays, arrays[0]), tpu)],
            "splash": [Job(_training(each), (*flat, flat[0]), tpu) for each in splash],
        }

    def _splash(self, blocks: tuple[int, int, int], gradient_block: int | None = None) -> Callable[..., Any]:
        from jax.experimental.pallas.ops.tpu.splash_attention import (
            splash_attention_kernel,
            splash_attention_mask,
        )

        names = ("block_q", "block_kv", "block_kv_compute")
        sizes = {name: min(size, self.length) for name, size in zip(names, blocks, strict=True)}
        if gradient_block is not None:
            size = min(gradient_block, self.length)
            more = ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq")
            sizes |= dict.fromkeys(more, size)
        one = splash_attention_mask.CausalMask if self.causal else splash_attention_mask.FullMask
        attention = splash_attention_kernel.make_splash_mha(
            splash_attention_mask.MultiHeadMask([one((self.length, self.length))] * self.heads),
            block_sizes=splash_attention_kernel.BlockSizes(**sizes),
            head_shards=1,
            q_seq_shards=1,
        )
        return lambda q, k, v: attention(q, k, v)


def _ours(form: dict[str, Any], query: Any, key: Any, value: Any) -> Any:
    return flash.flash_attention(query, key, value, **form)[0]


def _training(attention: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    def step(query: Any, key: Any, value: Any, grad: Any) -> Any:
        out, pullback = jax.vjp(attention, query, key, value)
        return out, pullback(grad)

    return step


def _simulated(jobs: Iterable[Job]) -> Profile | None:
    """The fastest of the jobs; None where none can be simulated."""
    found = []
    for job in jobs:
        try:
            found += simulate_many([job], workers=1)
        except TpuKernelsError as error:
            Console(stderr=True).print(f"not run: {str(error).splitlines()[0][:160]}", markup=False)
    return min(found, key=lambda profile: profile.time_ms, default=None)


def rows_of(problem: Problem, tpu: str, gradient: bool) -> list[dict[str, Any]]:
    """A row for the pass, and one for it with its gradient."""
    peak = load_calibration(tpu).peak_tflops
    rows = []
    for trains in (False, True)[: 1 + gradient]:
        times = {name: _simulated(jobs) for name, jobs in problem.jobs(tpu, trains).items()}
        ours, splash = (None if each is None else each.time_ms for each in times.values())
        flops = problem.flops(False) + (problem.flops(True) if trains else 0.0)
        rows.append(
            {
                "tpu": tpu,
                "problem": str(problem),
                "pass": "forward and gradient" if trains else "forward",
                "ours_ms": ours,
                "of_peak": None if ours is None else flops / ours / 1e9 / peak,
                "splash_ms": splash,
                "recorded": problem.recorded_ms(tpu, trains),
            }
        )
    return rows


def main(
    tpu: Annotated[str, typer.Option(help="Generations, comma-separated.")] = "v6e",
    shape: Annotated[str, typer.Option(help="heads x kv heads x length x D[:full], comma-separated.")] = (
        "32x4x8192x128"
    ),
    gradient: Annotated[bool, typer.Option(help="The gradient too.")] = True,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Simulate prefill attention, and training."""
    problems = [Problem.parse(text) for text in shape.split(",")]
    found = [
        row
        for generation in tpu.split(",")
        for problem in problems
        for row in rows_of(problem, generation, gradient)
    ]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table(title="Attention, kernels simulated, in ms; recorded: splash on real TPUs, by others")
    for name in ("TPU", "problem", "pass"):
        table.add_column(name)
    for name in ("ours", "of peak", "splash", "ours faster by", "recorded"):
        table.add_column(name, justify="right")
    for row in found:
        ours, splash = row["ours_ms"], row["splash_ms"]
        faster = f"{splash / ours:.2f}x" if ours and splash else ""
        cells = [f"{ours:.3f}" if ours else "", f"{row['of_peak']:.1%}" if ours else ""]
        cells += [f"{splash:.3f}" if splash else "not run", faster]
        recorded = row["recorded"]
        # A recorded gradient is that of the gradient alone.
        of = " (gradient)" if row["pass"] != "forward" else ""
        cells.append("" if recorded is None else f"{recorded:.3f}{of}")
        table.add_row(row["tpu"], row["problem"], row["pass"], *cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    typer.run(main)
