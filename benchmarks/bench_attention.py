"""Simulated times of prefill attention and its gradient, beside jax's splash attention. No TPU is needed.

python -m benchmarks.bench_attention                                # v6e, 8K causal, 32 query and 4 kv heads
python -m benchmarks.bench_attention --tpu v5e,tpu7x --shape 32x8x8192x128,24x24x4096x64:full
python -m benchmarks.bench_attention --no-gradient
python -m benchmarks.bench_attention --tpu tpu7x --recorded         # ours beside every recorded time of splash

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
      heads, kv_heads, length, dim, value_dim: Hq, H, L, D and E.
      causal: a token sees itself and those before.
    """

    heads: int
    kv_heads: int
    length: int
    dim: int
    value_dim: int
    causal: bool

    @classmethod
    def parse(cls, text: str) -> Problem:
        """Reads ``32x4x8192x128``, with ``:full`` behind it where it is not causal."""
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)(:full)?", text)
        if match is None:
            raise typer.BadParameter(f"{text!r} is no shape; give heads x kv heads x length x head dimension")
        heads, kv_heads, length, dim = (int(number) for number in match.groups()[:4])
        return cls(heads, kv_heads, length, dim, dim, causal=match[5] is None)

    @classmethod
    def recorded(cls, tpu: str) -> list[Problem]:
        """Those that there are recorded times for, shortest first."""
        found = set()
        for record in load_records():
            if record.generation == tpu and record.op in RECORDED.values():
                (heads, queries, dim), (kv_heads, keys, _), (_, _, value_dim) = (
                    parse_shape(record.arguments[name])[1] for name in "qkv"
                )
                if queries == keys:
                    causal = record.arguments["mask"]["is_causal"]
                    found.add(cls(heads, kv_heads, keys, dim, value_dim, causal))
        return sorted(found, key=lambda problem: problem.flops(gradient=False))

    def __str__(self) -> str:
        dim = f"D {self.dim}" if self.dim == self.value_dim else f"D {self.dim}, E {self.value_dim}"
        return (
            f"{self.heads}/{self.kv_heads} heads, {self.length}, {dim}, {'causal' if self.causal else 'full'}"
        )

    def flops(self, gradient: bool) -> float:
        """Of the products that a pass, or its gradient, cannot do without."""
        pairs = self.heads * visible_pairs(self.length, self.length, self.causal, None)
        return 2.0 * pairs * ((3 if gradient else 1) * self.dim + (2 if gradient else 1) * self.value_dim)

    def recorded_ms(self, tpu: str, gradient: bool) -> float | None:
        """The shortest of others' recorded times of splash attention for it."""
        wanted = [(self.heads, self.length, self.dim), (self.kv_heads, self.length, self.dim)]
        wanted.append((self.kv_heads, self.length, self.value_dim))
        times = [
            record.median_ms
            for record in load_records()
            if (record.generation, record.op) == (tpu, RECORDED[gradient])
            and [parse_shape(record.arguments[name])[1] for name in "qkv"] == wanted
            and record.arguments["mask"]["is_causal"] == self.causal
            and not record.arguments["dropout_rate"]
        ]
        return min(times, default=None)

    def ours(self, tpu: str, gradient: bool) -> Job:
        """The program of this library's kernel."""
        attention: Callable[..., Any] = partial(_ours, {"causal": self.causal, "tpu": tpu})
        return Job(_training(attention) if gradient else attention, self._arrays(gradient), tpu)

    def splash(self, tpu: str, gradient: bool) -> list[Job]:
        """Programs of jax's kernel, of which the fastest counts."""
        arrays = tuple(x.update(shape=x.shape[1:]) for x in self._arrays(gradient))
        if not gradient:
            return [Job(self._splash(blocks), arrays, tpu) for blocks in SPLASH_BLOCKS]
        blocks = [self._splash(SPLASH_BLOCKS[0], block) for block in SPLASH_GRADIENT_BLOCKS]
        return [Job(_training(each), arrays, tpu) for each in blocks]

    def _arrays(self, gradient: bool) -> tuple[Any, ...]:
        import jax

        query, key = (self.heads, self.dim), (self.kv_heads, self.dim)
        value, grad = (self.kv_heads, self.value_dim), (self.heads, self.value_dim)
        return tuple(
            jax.ShapeDtypeStruct((1, heads, self.length, dim), "bfloat16")
            for heads, dim in [query, key, value, grad][: 3 + gradient]
        )

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


def fastest(jobs: Iterable[Job], what: object) -> Profile | None:
    """The fastest of the jobs; None where none can be simulated."""
    found = []
    for job in jobs:
        try:
            found += simulate_many([job], workers=1)
        except TpuKernelsError as error:
            Console(stderr=True).print(f"not run, {what}: {str(error).splitlines()[0][:160]}", markup=False)
    return min(found, key=lambda profile: profile.time_ms, default=None)


def rows_of(problem: Problem, tpu: str, gradient: bool, peers: bool) -> list[dict[str, Any]]:
    """A row for the pass, and one for its gradient, without the pass that it needs."""
    peak = load_calibration(tpu).peak_tflops
    rows = []
    for trains in (False, True)[: 1 + gradient]:
        recorded = problem.recorded_ms(tpu, trains)
        if not peers and recorded is None:
            continue
        ours = fastest([problem.ours(tpu, trains)], problem)
        splash = fastest(problem.splash(tpu, trains), problem) if peers else None
        times = [None if each is None else _pass_ms(each, trains) for each in (ours, splash)]
        rows.append(
            {
                "tpu": tpu,
                "problem": str(problem),
                "pass": "gradient" if trains else "forward",
                "ours_ms": times[0],
                "of_peak": None if times[0] is None else problem.flops(trains) / times[0] / 1e9 / peak,
                "splash_ms": times[1],
                "recorded": recorded,
            }
        )
    return rows


def _pass_ms(profile: Profile, gradient: bool) -> float:
    """Of all kernels; of a gradient without the first one, which is the pass."""
    first = profile.kernels[0].time_ms if gradient else 0.0
    return profile.time_ms - first


def main(
    tpu: Annotated[str, typer.Option(help="Generations, comma-separated.")] = "v6e",
    shape: Annotated[str, typer.Option(help="heads x kv heads x length x D[:full], comma-separated.")] = (
        "32x4x8192x128"
    ),
    gradient: Annotated[bool, typer.Option(help="The gradient too.")] = True,
    recorded: Annotated[bool, typer.Option(help="Every problem with a recorded time; no peers.")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Simulate prefill attention, and training."""
    found = []
    for generation in tpu.split(","):
        given = [Problem.parse(text) for text in shape.split(",")]
        for problem in Problem.recorded(generation) if recorded else given:
            found += rows_of(problem, generation, gradient, peers=not recorded)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table(title="Attention, kernels simulated, in ms; recorded: splash on real TPUs, by others")
    for name in ("TPU", "problem", "pass"):
        table.add_column(name)
    for name in ("ours", "of peak", "splash", "recorded", "ours faster by"):
        table.add_column(name, justify="right")
    for row in found:
        times = [row[name] for name in ("ours_ms", "splash_ms", "recorded")]
        ours, *others = times
        best = min((each for each in others if each is not None), default=None)
        shown = ["" if each is None else f"{each:.3f}" for each in times]
        shown.insert(1, "" if ours is None else f"{row['of_peak']:.1%}")
        faster = f"{best / ours:.2f}x" if ours and best else ""
        table.add_row(row["tpu"], row["problem"], row["pass"], *shown, faster)
    Console(width=150).print(table)


if __name__ == "__main__":
    typer.run(main)
