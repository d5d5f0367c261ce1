from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from tpu_kernels import analysis
from tpu_kernels.analysis.simulator.calibration import calibrated
from tpu_kernels.errors import SimulationError

from ..conftest import needs_libtpu
from . import kernels
from .kernels import shape

pytestmark = needs_libtpu

PAGE = 8 * 128 * 4
PAGES = shape(64, 8, 128)


def traffic(profile: analysis.Profile) -> dict[str, tuple[int, int]]:
    return {part.operand: (part.read_bytes, part.written_bytes) for part in profile.traffic}


@pytest.mark.parametrize("tpu", calibrated())
def test_traffic_is_that_of_the_block_specs(tpu: str) -> None:
    m, k, n, rows, columns = 4096, 4096, 16384, 128, 512
    profile = analysis.simulate(
        kernels.matmul,
        *[shape(*dims, dtype="bfloat16") for dims in ((m, k), (k, n))],
        tpu=tpu,
        static={"rows": rows, "columns": columns},
    )
    assert traffic(profile) == {
        "lhs": (m * k * 2, 0),
        "rhs": (m // rows * k * n * 2, 0),
        "result": (0, m * n * 2),
    }
    assert profile.hbm_bytes == (m * k + m // rows * k * n + m * n) * 2
    # Nothing is faster than the machine, and a product of such blocks is not far from it.
    assert 0.3 < profile.roofline.ratio <= 1.02
    assert profile.units["MXU"] <= 1
    assert profile.compute + profile.stall + profile.overhead == pytest.approx(1)
    assert profile.evidence == "simulated"


def test_two_cores_share_the_work_and_the_bandwidth() -> None:
    def simulate(m: int, k: int, n: int, *, parallel: bool) -> analysis.Profile:
        arrays = [shape(*dims, dtype="bfloat16") for dims in ((m, k), (k, n))]
        static = {"rows": 256, "parallel": parallel}
        return analysis.simulate(kernels.matmul_by_cores, *arrays, tpu="v5p", static=static)

    one, both = (simulate(4096, 2048, 1024, parallel=parallel) for parallel in (False, True))
    assert both.time_ms < 0.6 * one.time_ms
    assert both.roofline.flops == one.roofline.flops
    rhs = 2048 * 1024 * 2
    assert traffic(one)["rhs"] == (rhs, 0)
    assert traffic(both) == traffic(one) | {"rhs": (2 * rhs, 0)}
    bound = simulate(16384, 128, 4096, parallel=True)
    assert bound.roofline.bound == "memory"
    assert 0.8 < bound.roofline.ratio <= 1.02


def test_time_grows_with_the_grid() -> None:
    times = [
        analysis.simulate(kernels.doubled, shape(256 * steps, 4096)).time_ms for steps in (16, 32, 48, 64)
    ]
    growth = np.diff(times)
    assert growth == pytest.approx([growth[0]] * 3, rel=0.01)
    # The parts that do not grow are the first block's way in and the last one's way out.
    assert times[0] == pytest.approx(16 * growth[0] / 16, rel=0.2)


def test_control_follows_the_data() -> None:
    for last_column in ([1, 0, 5, 2], [0, 0, 0, 9]):
        table = np.full((4, 3), 63)
        table[:, 2] = last_column
        profile = analysis.simulate(kernels.fetched, shape(4, 3, dtype="int32"), PAGES, data={"table": table})
        assert traffic(profile)["pages"] == (sum(last_column) * PAGE, 0)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"), [(1, 1, "int32"), (3, 130, "int32"), (20, 300, "int32"), (20, 300, "int8")]
)
def test_tables_are_read_as_scalar_memory_has_them(rows: int, columns: int, dtype: str) -> None:
    table = np.zeros((rows, columns), int)
    table[:, -1] = counts = np.arange(rows) % 4
    profile = analysis.simulate(
        kernels.fetched, shape(rows, columns, dtype=dtype), PAGES, data={"table": table.tolist()}
    )
    assert traffic(profile).get("pages", (0, 0)) == (counts.sum() * PAGE, 0)


def test_narrow_integers_are_read_as_scalar_memory_has_them() -> None:
    counts = np.arange(700) % 3
    profile = analysis.simulate(
        kernels.fetched_by_bytes, shape(700, dtype="int8"), PAGES, data={"counts": counts}
    )
    assert traffic(profile)["pages"] == (counts.sum() * PAGE, 0)


def test_integers_that_xla_computes_are_evaluated() -> None:
    profile = analysis.simulate(
        kernels.fetched_by_counts, shape(4, dtype="int32"), PAGES, data={"counts": [1, 0, 2, 3]}
    )
    assert traffic(profile)["pages"] == ((1 + 1 + 3 + 6) * PAGE, 0)
    assert profile.xla_ops
    assert profile.xla_ms > 0


def test_what_a_kernel_counts_itself_is_evaluated() -> None:
    table = np.random.default_rng(0).integers(0, 9, (40, 1))
    ids, given = shape(40, 1, dtype="int32"), {"table": table}
    profile = analysis.simulate(kernels.fetched_by_own_counts, ids, PAGES, data=given)
    assert traffic(profile)["pages"] == ((table < 4).sum() * PAGE, 0)
    copied = "control flow depends on scalar memory that was copied from vector memory"
    with pytest.raises(SimulationError, match=copied):
        analysis.simulate(kernels.fetched_by_own_counts, ids, PAGES)
    with pytest.raises(SimulationError, match=copied):
        analysis.simulate(kernels.fetched_by_own_counts, ids, PAGES, data=given, static={"looped": True})


def test_kernels_in_loops_and_several_kernels_add_up() -> None:
    counts = [2, 3, 4, 0]
    profile = analysis.simulate(
        kernels.doubled_in_a_loop,
        shape(4, dtype="int32"),
        PAGES,
        data={"counts": counts},
        static={"steps": 3},
    )
    assert {(kernel.name, kernel.runs) for kernel in profile.kernels} == {("fetched", 3), ("doubled", 1)}
    [pages] = [part for part in profile.traffic if part.kernel == "fetched" and part.shape == "f32[64,8,128]"]
    assert pages.read_bytes == sum(counts[:3]) * PAGE
    assert sum(kernel.time_ms for kernel in profile.kernels) == pytest.approx(profile.time_ms)


def test_other_libraries_kernels() -> None:
    """jax's grouped matmul lists its tiles in XLA ops, and its attention its blocks in constants."""
    from jax.experimental.pallas.ops.tpu import megablox
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    m, k, n, groups = 8192, 1024, 512, 8
    sizes = [1600, 0, 3200, 0, 0, 2400, 992, 0]

    def grouped_matmul(lhs, rhs, group_sizes):
        return megablox.gmm(lhs, rhs, group_sizes, tiling=(128, k, n))

    arrays = [shape(*dims, dtype="bfloat16") for dims in ((m, k), (groups, k, n))]
    profile = analysis.simulate(
        grouped_matmul, *arrays, shape(groups, dtype="int32"), data={"group_sizes": sizes}
    )
    # Each tile of rows is read once, and each group with rows.
    assert traffic(profile)["lhs"] == (m * k * 2, 0)
    assert traffic(profile)["rhs"] == (4 * k * n * 2, 0)

    heads, length, width, block = 8, 4096, 128, 512
    causal = splash_attention_mask.CausalMask((length, length))
    blocks = splash_attention_kernel.BlockSizes(block_q=block, block_kv=block, block_kv_compute=block)
    attention = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([causal] * heads),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
    )
    profile = analysis.simulate(
        lambda q, k, v: attention(q, k, v), *[shape(heads, length, width, dtype="bfloat16")] * 3
    )
    visited = heads * sum(range(1, length // block + 1))
    assert visited * block * width * 2 >= traffic(profile)["k"][0] > heads * length * width * 2
    assert traffic(profile)["q"] == (heads * length * width * 2, 0)


def test_integers_that_control_needs_must_be_given() -> None:
    arguments = shape(4, 3, dtype="int32"), PAGES
    with pytest.raises(SimulationError, match="depends on the integers of table, which are not given"):
        analysis.simulate(kernels.fetched, *arguments)
    with pytest.raises(SimulationError, match=r"'tabel'.* are table, pages"):
        analysis.simulate(kernels.fetched, *arguments, data={"tabel": np.zeros((4, 3), int)})
    with pytest.raises(SimulationError, match=r"'table' has shape \[3\]; the argument has \[4, 3\]"):
        analysis.simulate(kernels.fetched, *arguments, data={"table": [1, 2, 3]})
    with pytest.raises(SimulationError, match="dtype float64; it must be of integers"):
        analysis.simulate(kernels.fetched, *arguments, data={"table": np.zeros((4, 3))})


def test_what_cannot_be_followed_is_an_error() -> None:
    with pytest.raises(SimulationError, match="depends on a value that the vector unit computes"):
        analysis.simulate(kernels.where_large, shape(8, 128))
    with pytest.raises(SimulationError, match="deadlock: the kernel waits for 128"):
        analysis.simulate(kernels.stuck, shape(8, 128))
    with pytest.raises(SimulationError, match="no Pallas kernel"):
        analysis.simulate(lambda x: x + 1, shape(8, 128))
    with pytest.raises(SimulationError, match=r"does not compile for v6e: .*VMEM"):
        analysis.simulate(functools.partial(kernels.doubled, rows=8192), shape(8192, 4096))
    with pytest.raises(SimulationError, match="not calibrated for v4, only for tpu7x, v5e, v5p, v6e"):
        analysis.simulate(kernels.doubled, shape(512, 128), tpu="v4")


def test_a_profile_says_what_it_is(tmp_path: Path) -> None:
    profile = analysis.simulate(kernels.doubled, shape(4096, 4096))
    text = str(profile)
    assert text.startswith("doubled on v6e, simulated: ")
    assert "HBM      x f32[4096,4096]: 64.0 MiB read, 1.00 of its 64.0 MiB" in text
    assert analysis.Profile.from_json(profile.to_json()) == profile
    assert json.loads(profile.to_json())["evidence"] == "simulated"
    with pytest.raises(ValueError, match="no profile"):
        analysis.Profile.from_json("{}")


def test_the_timeline_is_a_chrome_trace(tmp_path: Path) -> None:
    steps = 16
    profile = analysis.simulate(kernels.doubled, shape(256 * steps, 4096))
    profile.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {"kernel", "loop 1", "DMA from HBM", "DMA to HBM", "waiting for DMA"} <= set(tracks.values())
    whole = [e for e in events if e["ph"] == "X" and tracks[e["tid"]] == "kernel"]
    assert [e["dur"] for e in whole] == [pytest.approx(profile.time_ms * 1e3)]
    begun, ended = ([e for e in events if e["ph"] == phase] for phase in "be")
    assert {(e["id"], e["cat"]) for e in begun} == {(e["id"], e["cat"]) for e in ended}
    assert sum(e["args"]["bytes"] for e in begun) == profile.hbm_bytes
    # All lie within the kernel, and complete events on one line do not overlap.
    lines: dict[int, float] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        assert 0 <= event["ts"] <= event["ts"] + event["dur"] <= whole[0]["dur"] * (1 + 1e-9)
        assert event["ts"] >= lines.get(event["tid"], 0) - 1e-6
        lines[event["tid"]] = event["ts"] + event["dur"]
    iterations = [e for e in events if e["ph"] == "X" and tracks[e["tid"]] == "loop 1"]
    assert len(iterations) >= steps
