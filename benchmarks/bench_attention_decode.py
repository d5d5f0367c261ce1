"""Simulated times of decode attention over a static cache, chained as in a model. No TPU is needed.

python -m benchmarks.bench_attention_decode                              # v6e
python -m benchmarks.bench_attention_decode --tpu v6e,tpu7x,v5e --case qwen3-30b-a3b:8x4096,qwen3-tp8:64x1024

A case is model:sequences x keys, all of them valid. Beside ours: jax's paged attention, on a cache of its own layout;
and the least that dense attention through XLA can take, the bytes of its ops at attainable bandwidth, with the cache as
it is and with keys and values repeated for the query heads, as torch's sdpa is lowered.
"""

from __future__ import annotations

import kernels_src.conftest  # noqa: F401  (makes the kernels' JAX side importable, without torch)

# isort: split
import json
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer
from attention import functions
from attention.cases import CASES, Case
from rich.console import Console
from rich.table import Table

from benchmarks.bench_attention import fastest
from tpu_kernels.analysis.compiler import Job, compile_many
from tpu_kernels.analysis.simulator.calibration import load_calibration

MODELS = {case.name: case for case in (*CASES, Case("qwen3-tp8", 4, 1, 128))}
DEFAULT = (
    "qwen3-30b-a3b:8x4096,qwen3-30b-a3b:8x1024,qwen3-30b-a3b:8x512,qwen3-tp8:64x1024,qwen3-tp8:64x512,"
    "qwen3-tp8:64x256,llama-3.1-8b:8x4096,gpt-oss-20b-full:8x4096,gpt-oss-20b-sliding:64x4096,"
    "gemma-4-26b-a4b-sliding:8x4096,gemma-4-26b-a4b-full:8x4096"
)
PAGE, PAGES_PER_BLOCK = 128, (4, 8)


def _chained(attention: Callable[..., Any], case: Case, sequences: int, keys: int, tpu: str) -> Job:
    """An attention between two other ops, as in a model: queries and results need not be in HBM."""
    import jax

    arrays, _ = case.call(sequences, keys)
    names = list(arrays)

    def step(query: Any, key: Any, value: Any, lengths: Any, *sinks: Any) -> Any:
        given = dict(zip(names, (query * 2, key, value, lengths, *sinks), strict=True))
        return attention(**given) * 2

    shapes = tuple(jax.ShapeDtypeStruct(*array) for array in arrays.values())
    return Job(step, shapes, tpu, data={"lengths": np.full(sequences, keys)})


def _ours(case: Case, sequences: int, keys: int, tpu: str) -> Job:
    _, static = case.call(sequences, keys)
    return _chained(
        lambda **arrays: functions.decode_attention(**arrays, **static, tpu=tpu), case, sequences, keys, tpu
    )


def _paged(case: Case, sequences: int, keys: int, tpu: str, pages_per_block: int) -> Job:
    import jax
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    pages = keys // PAGE

    def step(query: Any, key: Any, value: Any, lengths: Any, indices: Any) -> Any:
        out = paged_attention(
            query * 2, key, value, lengths, indices, pages_per_compute_block=min(pages_per_block, pages)
        )
        return out * 2

    cache = (case.kv_heads, sequences * pages, PAGE, case.head_dim), "bfloat16"
    shapes = [((sequences, case.heads, case.head_dim), "bfloat16"), cache, cache]
    shapes += [((sequences,), "int32"), ((sequences, pages), "int32")]
    data = {
        "lengths": np.full(sequences, keys),
        "indices": np.arange(sequences * pages).reshape(sequences, pages),
    }
    return Job(step, tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes), tpu, data=data)


def _dense(case: Case, sequences: int, keys: int, tpu: str, *, repeated: bool) -> Job:
    import jax
    import jax.numpy as jnp

    def attention(query: Any, key: Any, value: Any, lengths: Any, sinks: Any = None) -> Any:
        if repeated:
            key, value = (jnp.repeat(x, case.heads // case.kv_heads, axis=1) for x in (key, value))
        mask = (jnp.arange(keys) < lengths[:, None])[:, None, None]
        out = jax.nn.dot_product_attention(
            *(x.swapaxes(1, 2) for x in (query, key, value)), mask=mask, scale=case.head_dim**-0.5
        )
        return out.swapaxes(1, 2)

    return _chained(attention, case, sequences, keys, tpu)


def _simulated_us(what: str, *jobs: Job) -> float | None:
    profile = fastest(jobs, what)
    return None if profile is None else profile.time_ms * 1e3


def _least_us(job: Job, gbps: float) -> float | None:
    """What the bytes of a program's ops take, if nothing else did."""
    [report] = compile_many([job], workers=1)
    return sum(op.traffic_bytes for op in report.ops) / gbps / 1e3 if report.compiled else None


def row_of(text: str, tpu: str) -> dict[str, Any]:
    """Our time for a case, its share of attainable bandwidth, and the others'."""
    name, _, size = text.partition(":")
    if name not in MODELS:
        raise typer.BadParameter(f"there is no {name!r}, only {', '.join(MODELS)}")
    sequences, keys = (int(number) for number in size.split("x"))
    case, gbps = MODELS[name], load_calibration(tpu).memory.attainable_gbps
    seen = min(keys, case.window or keys)
    valid = sequences * seen * case.kv_heads * case.head_dim * 2 * 2
    ours = _simulated_us(text, _ours(case, sequences, keys, tpu))
    given = case, sequences, keys, tpu
    plain = case.window is None and not case.sinks
    return {
        "tpu": tpu,
        "case": text,
        "valid_mb": valid / 1e6,
        "bytes_us": valid / gbps / 1e3,
        "ours_us": ours,
        "share": None if ours is None else valid / gbps / 1e3 / ours,
        "paged_us": _simulated_us(text, *(_paged(*given, each) for each in PAGES_PER_BLOCK))
        if plain
        else None,
        "dense_least_us": _least_us(_dense(*given, repeated=False), gbps),
        "repeated_least_us": _least_us(_dense(*given, repeated=True), gbps),
    }


def main(
    tpu: Annotated[str, typer.Option(help="Generations, comma-separated.")] = "v6e",
    case: Annotated[str, typer.Option(help="model:sequences x keys, comma-separated.")] = DEFAULT,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Simulate decode attention."""
    found = [row_of(text, generation) for generation in tpu.split(",") for text in case.split(",")]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table(title="Decode attention: kernels simulated; XLA at least; in us")
    for heading in ("TPU", "case"):
        table.add_column(heading)
    for heading in (
        "valid MB",
        "bytes",
        "ours",
        "of attainable",
        "paged",
        "XLA at least",
        "with K, V repeated",
    ):
        table.add_column(heading, justify="right")
    for row in found:
        times = (row[name] for name in ("ours_us", "paged_us", "dense_least_us", "repeated_least_us"))
        ours, *others = ("" if each is None else f"{each:.1f}" for each in times)
        share = "" if row["share"] is None else f"{row['share']:.1%}"
        lead = row["tpu"], row["case"], f"{row['valid_mb']:.1f}", f"{row['bytes_us']:.1f}"
        table.add_row(*lead, ours, share, *others)
    Console(width=150).print(table)


if __name__ == "__main__":
    typer.run(main)
