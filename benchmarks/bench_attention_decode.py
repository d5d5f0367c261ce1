"""Simulated times of decode attention over a static cache, chained as in a model. No TPU is needed.

python -m benchmarks.bench_attention_decode                              # v6e
python -m benchmarks.bench_attention_decode --tpu v6e,tpu7x,v5e --case qwen3-30b-a3b:8x4096,qwen3-tp8:64x1024

A case is model:sequences x keys, all of them valid. Beside ours: jax's paged attention, on a cache of its own layout;
and between what times dense attention through XLA is by the schedules of its ops, with the cache as it is and with keys
and values repeated for the query heads, as torch's sdpa is lowered.

With --append: a step that also writes one new token a sequence to donated caches, in the kernel's call, and by XLA
ahead of it.
"""

from __future__ import annotations

import kernels_src.conftest  # noqa: F401  (makes the kernels' JAX side importable, without torch)

# isort: split
import dataclasses
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
from tpu_kernels.projection.times import Bounds, bounds_of, op_times

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


def _appending(case: Case, sequences: int, keys: int, tpu: str, *, fused: bool) -> Job:
    """A step that writes the last key and value of the cache, all sequences being at the same place."""
    import jax

    arrays, static = case.call(sequences, keys)
    names = list(arrays)
    rows = (sequences, case.kv_heads, 1, case.head_dim), "bfloat16"

    def step(
        query: Any, key: Any, value: Any, lengths: Any, new_key: Any, new_value: Any, place: Any, *sinks: Any
    ) -> Any:
        given = dict(zip(names, (query * 2, key, value, lengths, *sinks), strict=True))
        rows = {"key": new_key * 2, "value": new_value * 2}
        if fused:
            rows = {f"new_{name}": each for name, each in rows.items()}
            out, *caches = functions.append_attention(**given, **rows, **static, tpu=tpu)
        else:
            caches = [
                jax.lax.dynamic_update_slice(given[name], each, (0, 0, place, 0))
                for name, each in rows.items()
            ]
            given |= dict(zip(rows, caches, strict=True))
            out = functions.decode_attention(**given, **static, tpu=tpu)
        return out * 2, *caches

    shapes = list(arrays.values())
    shapes[4:4] = [rows, rows, ((), "int32")]
    given = tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    return Job(step, given, tpu, data={"lengths": np.full(sequences, keys)}, donated=(1, 2))


def _simulated_us(what: str, *jobs: Job) -> float | None:
    profile = fastest(jobs, what)
    return None if profile is None else profile.time_ms * 1e3


def _xla_us(job: Job, tpu: str) -> Bounds | None:
    """Between what times XLA's own ops of a program are, by their schedules."""
    [report] = compile_many([dataclasses.replace(job, every_schedule=True)], workers=1)
    if not report.compiled:
        return None
    calibration = load_calibration(tpu)
    return bounds_of(op_times(report, calibration), calibration)


def append_row_of(text: str, tpu: str) -> dict[str, Any]:
    """A step without a write to the cache, with it in the kernel's call, and with it ahead of that."""
    case, sequences, keys = _parsed(text)
    given = case, sequences, keys, tpu
    fused, apart = (_appending(*given, fused=each) for each in (True, False))
    return {
        "tpu": tpu,
        "case": text,
        "without_us": _simulated_us(text, _ours(*given)),
        "fused_us": _simulated_us(text, fused),
        "apart_kernel_us": _simulated_us(text, apart),
        "apart_xla_us": _xla_us(apart, tpu),
        "fused_xla_us": _xla_us(fused, tpu),
    }


def _parsed(text: str) -> tuple[Case, int, int]:
    name, _, size = text.partition(":")
    if name not in MODELS:
        raise typer.BadParameter(f"there is no {name!r}, only {', '.join(MODELS)}")
    sequences, keys = (int(number) for number in size.split("x"))
    return MODELS[name], sequences, keys


def row_of(text: str, tpu: str) -> dict[str, Any]:
    """Our time for a case, its share of attainable bandwidth, and the others'."""
    case, sequences, keys = _parsed(text)
    gbps = load_calibration(tpu).memory.attainable_gbps
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
        "dense_us": _xla_us(_dense(*given, repeated=False), tpu),
        "repeated_us": _xla_us(_dense(*given, repeated=True), tpu),
    }


def _text(time: float | Bounds | None) -> str:
    if isinstance(time, Bounds):
        return f"{time.low:.1f} to {time.high:.1f}"
    return "" if time is None else f"{time:.1f}"


def main(
    tpu: Annotated[str, typer.Option(help="Generations, comma-separated.")] = "v6e",
    case: Annotated[str, typer.Option(help="model:sequences x keys, comma-separated.")] = DEFAULT,
    append: Annotated[bool, typer.Option(help="Of steps that write to the cache.")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Simulate decode attention."""
    row = append_row_of if append else row_of
    found = [row(text, generation) for generation in tpu.split(",") for text in case.split(",")]
    if as_json:
        print(json.dumps(found, indent=2, default=dataclasses.asdict))
        return
    table = Table(
        title="Decode attention: kernels simulated; XLA between what times its schedules say; in us"
    )
    for heading in ("TPU", "case"):
        table.add_column(heading)
    if append:
        headings = {
            "without": "without_us",
            "in the call": "fused_us",
            "XLA around": "fused_xla_us",
            "call after XLA's write": "apart_kernel_us",
            "XLA around and write": "apart_xla_us",
        }
    else:
        headings = {
            "valid MB": "valid_mb",
            "bytes": "bytes_us",
            "ours": "ours_us",
            "of attainable": "share",
            "paged": "paged_us",
            "XLA": "dense_us",
            "with K, V repeated": "repeated_us",
        }
    for heading in headings:
        table.add_column(heading, justify="right")
    for each in found:
        cells = [
            f"{each[name]:.1%}" if name == "share" and each[name] else _text(each[name])
            for name in headings.values()
        ]
        table.add_row(each["tpu"], each["case"], *cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    typer.run(main)
