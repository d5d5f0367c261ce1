"""Compiles the recorded kernels, and keeps what the simulator needs of them."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.calibration.records import Record, parse_shape
from tpu_kernels import analysis
from tpu_kernels.analysis import hlo
from tpu_kernels.analysis.cache import cache_folder
from tpu_kernels.analysis.outcome import pack, unpack
from tpu_kernels.analysis.simulator.simulation import CalledKernel, called_kernels
from tpu_kernels.errors import AnalysisError

# tokamax names the tiles of the gradient in lhs after the forward product's axes. The records of these generations
# are from when it named them after the gradient's own: read otherwise, tiles would be longer than their axes.
_OWN_TILES = ("v5e", "tpu7x")


@dataclasses.dataclass(frozen=True)
class XlaOp:
    """An op beside the kernels: its bytes in HBM, and whether it runs while others do."""

    bytes: int
    beside: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled record: its kernels and what is around them."""

    kernels: tuple[CalledKernel, ...]
    ops: tuple[XlaOp, ...]
    versions: dict[str, str]


def compile_records(records: Sequence[Record], on_record: Callable[[Record, str | None], None]) -> None:
    """Compiles those that are not kept yet; tells of each, and why it could not be compiled."""
    waiting = [record for record in records if not _path(record).exists()]
    for record in waiting:
        try:
            job = record_job(record)
            [report] = analysis.compile_many([job], workers=1)
            program = Program(
                tuple(called_kernels(job, report)),
                tuple(
                    XlaOp(op.traffic_bytes, op.kind == "move")
                    for op in hlo.read_program(report.hlo, smallest=0)[1]
                ),
                dict(report.versions),
            )
        except (AnalysisError, NotImplementedError, TypeError, ValueError) as error:
            on_record(record, f"{type(error).__name__}: {error}")
            continue
        _store(record, program)
        on_record(record, None)


def load_program(record: Record) -> Program | None:
    """The record's program; None if it was not compiled."""
    path = _path(record)
    if not path.exists():
        return None
    values = json.loads(path.read_text())
    return Program(
        tuple(
            CalledKernel(
                kernel["name"],
                unpack(kernel["bundles"]),
                unpack(kernel["utilization"]),
                tuple(kernel["operands"]),
                tuple(
                    ({int(place): tuple(data) for place, data in call.items()}, count)
                    for call, count in kernel["calls"]
                ),
            )
            for kernel in values["kernels"]
        ),
        tuple(XlaOp(**op) for op in values["ops"]),
        values["versions"],
    )


def _path(record: Record) -> Path:
    return cache_folder().parent / "calibration" / f"{record.key}.json"


def _store(record: Record, program: Program) -> None:
    values = dataclasses.asdict(program)
    for kernel in values["kernels"]:
        kernel["bundles"] = pack(kernel["bundles"])
        kernel["utilization"] = pack(kernel["utilization"])
    path = _path(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(values))
    draft.replace(path)


def record_job(record: Record) -> analysis.Job:
    """The recorded kernel, to be compiled or simulated; tokamax must be installed."""
    if "lhs" in record.arguments:
        return _grouped_matmul(record)
    return _splash(record)


def _grouped_matmul(record: Record) -> analysis.Job:
    import jax
    import numpy as np
    from jax.lax import RaggedDotDimensionNumbers

    arguments = record.arguments
    if not all(isinstance(arguments[name], str) for name in ("lhs", "rhs")):
        raise ValueError("quantised operands")
    numbers = arguments["ragged_dot_dimension_numbers"]
    version_2 = record.op == "pallas_mosaic_tpu_v2_ragged_dot"
    # (Older releases have no version 2.)
    place = "tokamax._src.ops.ragged_dot.pallas_mosaic_tpu"
    module = importlib.import_module(f"{place}_v2" if version_2 else place)
    op = module.PallasMosaicTpuV2RaggedDot() if version_2 else module.PallasMosaicTpuRaggedDot()
    contracting, batch = numbers["dot_dimension_numbers"]
    config = dict(record.config)
    if not version_2 and contracting == [[1], [2]] and record.generation in _OWN_TILES:
        config["tile_k"], config["tile_n"] = config["tile_n"], config["tile_k"]
    sizes = np.array(record.group_sizes(), np.int32)

    def ragged_dot(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
        out, residuals = op._fwd(
            lhs,
            rhs,
            group_sizes=group_sizes,
            ragged_dot_dimension_numbers=RaggedDotDimensionNumbers(
                dot_dimension_numbers=(
                    tuple(map(tuple, contracting)),
                    tuple(map(tuple, batch)),
                ),
                lhs_ragged_dimensions=numbers["lhs_ragged_dimensions"],
                rhs_group_dimensions=numbers["rhs_group_dimensions"],
            ),
            precision=(jax.lax.Precision.DEFAULT,) * 2,
            preferred_element_type=arguments["preferred_element_type"],
            return_residuals=arguments["return_residuals"],
            config=module.Config(**config),
        )
        # Residuals are a second result, which XLA copies the first one into.
        return (out, residuals) if arguments["return_residuals"] else out

    arrays = [_array(arguments[name]) for name in ("lhs", "rhs")]
    return analysis.Job(
        ragged_dot,
        (*arrays, jax.ShapeDtypeStruct(sizes.shape, "int32")),
        record.generation,
        data={"group_sizes": sizes},
    )


def _splash(record: Record) -> analysis.Job:
    from tokamax._src.ops.experimental.tpu.splash_attention import base, pallas_mosaic_tpu

    arguments = record.arguments
    if record.op != "pallas_mosaic_tpu_splash_attention" or arguments["dropout_rate"]:
        raise ValueError("gradient or dropout of splash attention")
    op = pallas_mosaic_tpu.PallasMosaicTpuSplashAttention()
    config = dict(record.config)
    for name in ("q_layout", "k_layout", "v_layout"):
        config[name] = pallas_mosaic_tpu.QKVLayout(config[name])
    call = functools.partial(
        op._fwd,
        mask=base.Mask(is_causal=arguments["mask"]["is_causal"]),
        is_mqa=arguments["is_mqa"],
        mask_value=arguments["mask_value"],
        return_residuals=arguments["return_residuals"],
        config=pallas_mosaic_tpu.Config(**config),
    )

    def splash_attention(q: Any, k: Any, v: Any) -> Any:
        return call(q, k, v)

    arrays = [_array(arguments[name]) for name in ("q", "k", "v")]
    return analysis.Job(splash_attention, tuple(arrays), record.generation)


def _array(text: str) -> Any:
    import jax

    kind, axes = parse_shape(text)
    return jax.ShapeDtypeStruct(axes, {"bf16": "bfloat16", "f32": "float32"}[kind])
