"""Simulated times of a decode step's experts layer: one call beside two grouped matmuls. No TPU is needed.

python -m benchmarks.bench_experts                                  # v6e, Qwen3-30B-A3B, one rank of 8
python -m benchmarks.bench_experts --tpu v5e,tpu7x --model gpt-oss-20b --sharding none
python -m benchmarks.bench_experts --weights bfloat16,int8,mxfp4    # quantised ones beside
python -m benchmarks.bench_experts --tokamax                        # Python 3.12, tokamax 0.0.17
"""

from __future__ import annotations

import kernels_src.conftest  # noqa: F401  (makes the kernels' JAX side importable, without torch)

# isort: split
import dataclasses
import inspect
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
import typer
from moe_experts import cases, composed, functions
from moe_experts.activations import Gate
from moe_experts.ragged_dot.quantised import PER_WORD, exponents_of, packed_depth
from rich.console import Console
from rich.table import Table

from tpu_kernels.analysis.compiler import Job, compile_many
from tpu_kernels.analysis.simulator.calibration import Calibration, load_calibration
from tpu_kernels.analysis.simulator.profile import Profile
from tpu_kernels.analysis.simulator.simulation import profile_of
from tpu_kernels.analysis.workload import Workload, parse_workload

START_NS, LATENCY_NS = 100.0, 2000.0
FIXED_MS = 0.003  # what a call may take beside its bytes
WEIGHT_BITS = {"bfloat16": 16, "int8": 8, "mxfp4": 4.25}


@dataclasses.dataclass(frozen=True)
class Layer:
    """A decode step's experts layer on one chip: operands, and the integers that count."""

    workload: Workload
    call: Any
    index: np.ndarray
    weights: str = "bfloat16"
    shared: bool = False

    @property
    def active(self) -> int:
        """Experts of this chip that have tokens, the shared one included."""
        here = self.index[self.index < self.workload.local_experts]
        return len(np.unique(here)) + self.shared

    def floor_ms(self, calibration: Calibration) -> float:
        """The active experts' weights at attainable bandwidth."""
        an_expert = 3 * self.workload.hidden * self.workload.intermediate * WEIGHT_BITS[self.weights] / 8
        return self.active * an_expert / calibration.memory.attainable_gbps / 1e6

    def job(self, experts: Callable[..., Any], tpu: str) -> Job:
        """`experts` on this layer."""
        import jax

        arguments = {
            name: jax.ShapeDtypeStruct(self.index.shape, "int32")
            if name == "top_k_index"
            else jax.ShapeDtypeStruct(*value)
            for name, value in self.call.arguments.items()
        }

        def layer(*operands: Any) -> Any:
            return experts(**dict(zip(arguments, operands, strict=True)))

        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in arguments]
        layer.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return Job(layer, tuple(arguments.values()), tpu, data={"top_k_index": self.index})


def layer_of(
    model: str, tokens: int, sharding: str, weights: str = "bfloat16", shared: bool = False
) -> Layer:
    """A layer whose tokens' experts are drawn; under expert parallelism, on a rank with about the mean of work."""
    suffix = "" if sharding == "none" else f":{sharding}"
    workload = parse_workload(f"{model}:decode:{tokens}{suffix}")
    [call] = cases.calls(workload)
    index = np.asarray(workload.top_k_index, np.int32)
    here = workload.local_experts
    active = [len(np.unique(index[index // here == rank])) for rank in range(workload.experts // here)]
    working = [rank for rank, count in enumerate(active) if count]
    mean = np.mean([active[rank] for rank in working])
    rank = min(working, key=lambda rank: abs(active[rank] - mean))
    call = with_weights(with_shared(call) if shared else call, weights)
    return Layer(workload, call, (index - rank * here) % workload.experts, weights, shared)


def with_shared(call: Any) -> Any:
    """The call with a shared expert as large as the others."""
    arguments = dict(call.arguments)
    for name in ("gate_up", "down"):
        (_, *axes), dtype = arguments[f"{name}_proj"]
        arguments[f"shared_{name}"] = tuple(axes), dtype
    (tokens, _), _ = arguments["hidden_states"]
    arguments["shared_weights"] = (tokens,), "float32"
    return dataclasses.replace(call, arguments=arguments)


def with_weights(call: Any, weights: str) -> Any:
    """The call with its bfloat16 weights quantised."""
    if weights == "bfloat16":
        return call
    arguments, static, transposed = dict(call.arguments), dict(call.static), call.static["transposed"]
    for name in ("gate_up", "down"):
        (experts, *axes), _ = arguments[f"{name}_proj"]
        k, n = axes if transposed else axes[::-1]
        if weights == "int8":
            arguments[f"{name}_proj"] = (experts, *axes), "int8"
            arguments[f"{name}_scale"] = (experts, n), "float32"
        else:
            arguments[f"{name}_proj"] = (experts, packed_depth(k) // PER_WORD, n), "int32"
            arguments[f"{name}_scale"] = (experts, exponents_of(k), n), "uint8"
            static["transposed"] = True
    return dataclasses.replace(call, arguments=arguments, static=static)


def published_experts(*, gate: Gate, transposed: bool, **operands: Any) -> Any:
    """The layer by two of tokamax's grouped matmuls (v1) with XLA's ops around them; no biases, bfloat16."""
    import jax
    import jax.numpy as jnp
    from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu

    states, index, weights = operands["hidden_states"], operands["top_k_index"], operands["top_k_weights"]
    gate_up, down = operands["gate_up_proj"], operands["down_proj"]
    product = pallas_mosaic_tpu.PallasMosaicTpuRaggedDot()
    expert = index.reshape(-1)
    order = jnp.argsort(expert)
    group_sizes = jnp.sum(expert[:, None] == jnp.arange(len(down)), axis=0, dtype=jnp.int32)

    def ragged_dot(lhs: Any, rhs: Any) -> Any:
        # Tiles of whole weights, which move each of them once.
        config = pallas_mosaic_tpu.Config(tile_m=128, tile_k=rhs.shape[1], tile_n=rhs.shape[2])
        numbers = jax.lax.RaggedDotDimensionNumbers((([1], [1 if transposed else 2]), ([], [])), [0], [0])
        return product._fwd(
            lhs,
            rhs,
            group_sizes=group_sizes,
            ragged_dot_dimension_numbers=numbers,
            precision=(jax.lax.Precision.DEFAULT,) * 2,
            preferred_element_type=jnp.bfloat16,
            return_residuals=False,
            config=config,
        )[0]

    choices = index.shape[1]
    rows = states[order // choices]
    # Whole tiles of rows.
    rows = jnp.pad(rows, ((0, -len(rows) % 128), (0, 0)))
    inner = gate.apply(ragged_dot(rows, gate_up)).astype(states.dtype)
    out = ragged_dot(inner, down)[jnp.argsort(order)].astype(jnp.float32)
    out = jnp.where((expert < len(down))[:, None], out, 0).reshape(*index.shape, -1)
    return (out * weights[..., None]).sum(axis=1).astype(states.dtype)


def jobs_of(layer: Layer, tpu: str, tokamax: bool) -> dict[str, Job]:
    """The programs that are compared."""
    gate = dict(layer.call.static)
    form = {"transposed": gate.pop("transposed"), "gate": Gate(**gate)}
    programs = {
        "fused": partial(functions.fused_experts, **layer.call.static, tpu=tpu),
        "composed": partial(composed.composed_experts, **form, tpu=tpu, interpret=False),
    }
    if tokamax and layer.weights == "bfloat16":
        programs["tokamax"] = partial(published_experts, **form)
    if layer.shared:
        programs |= {name: beside(program, **form) for name, program in programs.items() if name != "fused"}
    return {name: layer.job(program, tpu) for name, program in programs.items()}


def beside(experts: Callable[..., Any], **form: Any) -> Callable[..., Any]:
    """`experts`, with a shared one by XLA's products."""

    def layer(*, shared_gate_up: Any, shared_down: Any, shared_weights: Any, **operands: Any) -> Any:
        states = operands["hidden_states"]
        more = composed.shared_expert(states, shared_gate_up, shared_down, shared_weights, **form)
        return experts(**operands) + more.astype(states.dtype)

    return layer


def altered(calibration: Calibration, **more_ns: float) -> Calibration:
    """The calibration with more nanoseconds for parts of a DMA."""
    memory = calibration.memory
    changed = {name: getattr(memory, name) + value for name, value in more_ns.items()}
    return calibration.model_copy(update={"memory": memory.model_copy(update=changed)})


def whole_ms(profile: Profile, states: str) -> float:
    """Kernels, simulated, and XLA's ops, estimated.

    But no copies of the states, `states` in XLA's notation: a program's own arguments and result may be laid out
    otherwise than a kernel has them, but not what other ops of a model write and read (`test_compile.py`).
    """
    beside = [op for op in profile.xla_ops if (op.kind, op.shape) != ("layout copy", states)]
    return profile.time_ms + sum(op.estimated_ms for op in beside)


def rows_of(layers: Sequence[Layer], tpu: str, tokamax: bool) -> list[dict[str, Any]]:
    """A row for each layer."""
    calibration = load_calibration(tpu)
    programs = [jobs_of(layer, tpu, tokamax) for layer in layers]
    reports = iter(compile_many([job for jobs in programs for job in jobs.values()]))
    rows = []
    for layer, jobs in zip(layers, programs, strict=True):
        compiled = {name: (job, next(reports)) for name, job in jobs.items()}
        (tokens, hidden), _ = layer.call.arguments["hidden_states"]

        def time(
            name: str,
            like: Calibration,
            compiled: dict[str, Any] = compiled,
            states: str = f"bf16[{tokens},{hidden}]",
        ) -> float:
            return whole_ms(profile_of(*compiled[name], like), states)

        times = {name: time(name, calibration) for name in compiled}
        fused, floor = times["fused"], layer.floor_ms(calibration)
        bound = floor + FIXED_MS
        rows.append(
            {
                "layer": layer.workload.name,
                "tpu": tpu,
                "weights": layer.weights,
                "shared": layer.shared,
                "active": layer.active,
                "floor_ms": floor,
                "fused_ms": fused,
                "of_bound": fused / bound,
                "slow_start": time("fused", altered(calibration, start_ns=START_NS)) / bound,
                "more_latency": time("fused", altered(calibration, latency_ns=LATENCY_NS)) / bound,
                **{f"{name}_ms": ms for name, ms in times.items() if name != "fused"},
            }
        )
    return rows


def main(
    tpu: Annotated[str, typer.Option(help="Generations, comma-separated.")] = "v6e",
    model: Annotated[str, typer.Option(help="Models, comma-separated.")] = "qwen3-30b-a3b",
    sharding: Annotated[str, typer.Option(help="ep8, tp8, or none for one chip; comma-separated.")] = "ep8",
    tokens: Annotated[str, typer.Option(help="Comma-separated.")] = "1,8,64,256,512",
    weights: Annotated[str, typer.Option(help="bfloat16, int8, mxfp4; comma-separated.")] = "bfloat16",
    shared: Annotated[bool, typer.Option(help="With a shared expert.")] = False,
    tokamax: Annotated[bool, typer.Option(help="Beside tokamax's grouped matmul v1.")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Simulate experts layers: in one call, and composed of grouped matmuls."""
    layers = [
        layer_of(name, int(count), how, kind, shared)
        for kind in weights.split(",")
        for name in model.split(",")
        for how in sharding.split(",")
        for count in tokens.split(",")
    ]
    found = [row for generation in tpu.split(",") for row in rows_of(layers, generation, tokamax)]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table(title="Experts layers, simulated, in ms; XLA's ops estimated")
    columns = ["floor", "fused", "of bound", "slow start", "latency", "composed", "faster"]
    for name in ("TPU", "layer", "weights"):
        table.add_column(name)
    for name in ("active", *columns, *(["tokamax", "faster"] if tokamax else [])):
        table.add_column(name, justify="right")
    for row in found:
        cells = [row["tpu"], row["layer"], row["weights"], str(row["active"])]
        cells += [f"{row[name]:.4f}" for name in ("floor_ms", "fused_ms")]
        cells += [f"{row[name]:.2f}" for name in ("of_bound", "slow_start", "more_latency")]
        for name in ("composed_ms", *(["tokamax_ms"] if tokamax else [])):
            cells += [f"{row[name]:.4f}", f"{row[name] / row['fused_ms']:.2f}x"]
        table.add_row(*cells)
    Console(width=160).print(table)
    print(
        f"floor: the active experts' weights at attainable bandwidth; bound: it and {FIXED_MS * 1e3:.0f} us.\n"
        f"Of the bound too: slow start: with {START_NS:.0f} ns more a DMA; latency: with {LATENCY_NS / 1e3:.0f} us "
        "more until one is seen as done."
    )


if __name__ == "__main__":
    typer.run(main)
