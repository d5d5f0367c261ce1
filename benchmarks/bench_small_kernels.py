"""The small kernels beside what XLA makes of the same, in their places in a model. No TPU is needed.

    python -m benchmarks.bench_small_kernels --tpu v6e,v5e --markdown table.md

Each place is a piece of a decoder layer in bfloat16: the matrix multiplications before and after a kernel belong to it,
since it is with them that XLA fuses what transformers computes. Both are compiled by the real TPU compiler. HBM traffic
and ops are of the compiled programs. Times are no measurements: a program takes as long as its traffic at attainable
bandwidth, or as its ops one after the other if that is more. Kernels are simulated, and XLA's ops take what XLA itself
estimates; where it gives no estimate, as for a sort, it is said how many ops those are, and they count for nothing.
"""

from __future__ import annotations

import kernels_src.conftest  # noqa: F401  (makes the kernels' JAX side importable, without torch)

# isort: split
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from gated_activation import kernel as gated
from rich.console import Console
from rich.progress import track
from rms_norm import kernel as norm
from rotary import kernel as rotary
from router import kernel as router
from router import reference as router_reference

from tpu_kernels.analysis.compiler import Job, compile_many
from tpu_kernels.analysis.hlo import read_program
from tpu_kernels.analysis.simulator.calibration import load_calibration
from tpu_kernels.analysis.simulator.simulation import profile_of

PHASES = {"decode": 64, "prefill": 4096}


@dataclasses.dataclass(frozen=True)
class Place:
    """A piece of a model.

    Attributes:
        name: What it is.
        shapes: Of its arrays.
        xla, ours: It, as transformers computes it and with our kernel, which is also given the generation.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    xla: Callable[..., Any]
    ours: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """What a piece was compiled to.

    Attributes:
        ops: Kernels and others, without those that only move data ahead of its use.
        unknown: Those of them that XLA has no estimate for.
        traffic: Bytes from and to HBM.
        time_us: As said above.
    """

    ops: int
    unknown: int
    traffic: int
    time_us: float


def places(phase: str) -> list[Place]:
    """The pieces, of Qwen3-8B and (rotation, router) Qwen3-30B-A3B."""
    t, hidden, inner, wide = PHASES[phase], 4096, 12288, 6144
    batch, tokens = (t, 1) if phase == "decode" else (1, t)
    return [
        Place("norm, projection", ((t, hidden), (hidden,), (wide, hidden)), _xla_norm, _our_norm),
        Place(
            "residual, norm, projection",
            ((t, hidden), (t, hidden), (hidden,), (wide, hidden)),
            _xla_residual_norm,
            _our_residual_norm,
        ),
        Place(
            "projections, rotation",
            ((batch, tokens, 2048), (4096, 2048), (512, 2048), *[(batch, tokens, 128)] * 2),
            _xla_rotation,
            _our_rotation,
        ),
        Place(
            "MLP with two projections",
            ((t, hidden), (inner, hidden), (inner, hidden), (hidden, inner)),
            _xla_mlp,
            _our_mlp,
        ),
        Place(
            "MLP with one projection",
            ((t, hidden), (2 * inner, hidden), (hidden, inner)),
            _xla_fused_mlp,
            _our_fused_mlp,
        ),
        Place(
            "router with its projection",
            ((t, 2048), (128, 2048)),
            lambda x, matrix: router_reference.route(_linear(x, matrix), top_k=8),
            lambda x, matrix, tpu: router.route(_linear(x, matrix), top_k=8, tpu=tpu),
        ),
    ]


def _linear(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """As torch's, with a row of the matrix for a result."""
    return jnp.einsum("...k,nk->...n", x, matrix)


def _normed(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return weight * (wide * scale).astype(x.dtype)


def _xla_norm(x: jax.Array, weight: jax.Array, matrix: jax.Array) -> Any:
    return _linear(_normed(x, weight), matrix)


def _our_norm(x: jax.Array, weight: jax.Array, matrix: jax.Array, tpu: str) -> Any:
    return _linear(norm.rms_norm(x, weight, tpu=tpu), matrix)


def _xla_residual_norm(x: jax.Array, residual: jax.Array, weight: jax.Array, matrix: jax.Array) -> Any:
    total = x + residual
    return _linear(_normed(total, weight), matrix), total


def _our_residual_norm(
    x: jax.Array, residual: jax.Array, weight: jax.Array, matrix: jax.Array, tpu: str
) -> Any:
    normed, total = norm.add_rms_norm(x, residual, weight, tpu=tpu)
    return _linear(normed, matrix), total


def _heads(x: jax.Array, matrix: jax.Array) -> jax.Array:
    batch, tokens, _ = x.shape
    return _linear(x, matrix).reshape(batch, tokens, -1, 128).transpose(0, 2, 1, 3)


def _xla_rotation(x: jax.Array, of_q: jax.Array, of_k: jax.Array, cos: jax.Array, sin: jax.Array) -> Any:
    def rotated(heads: jax.Array) -> jax.Array:
        turned = jnp.concatenate([-heads[..., 64:], heads[..., :64]], -1)
        return heads * cos[:, None] + turned * sin[:, None]

    return rotated(_heads(x, of_q)), rotated(_heads(x, of_k))


def _our_rotation(
    x: jax.Array, of_q: jax.Array, of_k: jax.Array, cos: jax.Array, sin: jax.Array, tpu: str
) -> Any:
    return rotary.rotary(_heads(x, of_q), _heads(x, of_k), cos, sin, tpu=tpu)


def _xla_mlp(x: jax.Array, of_gate: jax.Array, of_up: jax.Array, down: jax.Array) -> Any:
    return _linear(jax.nn.silu(_linear(x, of_gate)) * _linear(x, of_up), down)


def _our_mlp(x: jax.Array, of_gate: jax.Array, of_up: jax.Array, down: jax.Array, tpu: str) -> Any:
    return _linear(gated.gated_activation(_linear(x, of_gate), _linear(x, of_up), tpu=tpu), down)


def _xla_fused_mlp(x: jax.Array, of_both: jax.Array, down: jax.Array) -> Any:
    gate, up = jnp.split(_linear(x, of_both), 2, -1)
    return _linear(jax.nn.silu(gate) * up, down)


def _our_fused_mlp(x: jax.Array, of_both: jax.Array, down: jax.Array, tpu: str) -> Any:
    return _linear(gated.act_and_mul(_linear(x, of_both), tpu=tpu), down)


def compiled(place: Place, tpu: str) -> tuple[Program, Program]:
    """XLA's program and ours."""
    calibration = load_calibration(tpu)
    arrays = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in place.shapes)
    jobs = [Job(place.xla, arrays, tpu), Job(place.ours, arrays, tpu, {"tpu": tpu})]
    programs = []
    for job, report in zip(jobs, compile_many(jobs, workers=1), strict=True):
        if report.failure is not None:
            raise SystemExit(f"{place.name} does not compile for {tpu}: {report.failure.summary}")
        _, found = read_program(report.hlo, smallest=0)
        ops = [op for op in found if op.kind != "move"]
        traffic = sum(op.traffic_bytes for op in found)
        in_turn = sum(op.estimated_cycles or 0 for op in ops) / calibration.clock_ghz / 1e3
        if report.kernels:
            profile = profile_of(job, report, calibration)
            in_turn += profile.time_ms * 1e3
            traffic += profile.roofline.hbm_bytes
        programs.append(
            Program(
                ops=len(report.kernels) + len(ops),
                unknown=sum(op.estimated_cycles is None for op in ops),
                traffic=traffic,
                time_us=max(in_turn, traffic / calibration.memory.attainable_gbps / 1e3),
            )
        )
    return programs[0], programs[1]


def lines(generations: Sequence[str]) -> Iterator[str]:
    """The table, in Markdown."""
    yield "| TPU | phase | place | traffic, XLA | ours | ops, XLA | ours | µs, XLA | ours | ratio |"
    yield "|---|---|---|---:|---:|---:|---:|---:|---:|---:|"
    for tpu in generations:
        for phase in PHASES:
            for place in track(places(phase), f"{tpu}, {phase}", console=Console(stderr=True)):
                xla, ours = compiled(place, tpu)
                cells = [
                    *(f"{program.traffic / 2**20:.1f} MiB" for program in (xla, ours)),
                    *(_ops(program) for program in (xla, ours)),
                    *(f"{program.time_us:.1f}" for program in (xla, ours)),
                    f"{xla.time_us / ours.time_us:.2f}",
                ]
                yield f"| {tpu} | {phase} | {place.name} | {' | '.join(cells)} |"


def _ops(program: Program) -> str:
    unknown = f" ({program.unknown} without estimate)" if program.unknown else ""
    return f"{program.ops}{unknown}"


def main(
    tpu: Annotated[str, typer.Option(help="Generations, with commas between them.")] = "v6e",
    markdown: Annotated[Path | None, typer.Option(help="File for the table; else it is printed.")] = None,
) -> None:
    """Compare the small kernels with XLA, in their places in a model."""
    table = "\n".join(lines(tpu.split(","))) + "\n"
    if markdown is None:
        print(table)
    else:
        markdown.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
