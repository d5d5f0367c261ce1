"""A narrow model, projected from its config; and the real ones, slowly."""

from __future__ import annotations

import json
import time

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from tpu_kernels import analysis
from tpu_kernels.analysis.simulator.calibration import load_calibration
from tpu_kernels.cli import app
from tpu_kernels.errors import ProjectionError
from tpu_kernels.projection import project, projection
from tpu_kernels.projection.times import bounds_of, op_times

NARROW = {
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
PLAN = {"tpu": "v6e-4", "parallel": "ep2", "batches": (8,), "context": 256}
EXPERTS = ("batched_mm", "tpu_fused_experts")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("narrow")
    (folder / "config.json").write_text(json.dumps(NARROW))
    return folder


@pytest.fixture(scope="module")
def projected(folder, _own_cache):
    return project(folder, **PLAN, experts=EXPERTS)


def test_a_model_is_projected_from_its_config(projected):
    assert projected.evidence == "projected"
    assert [(row.arm.experts, row.arm.attention) for row in projected.rows] == [
        ("batched_mm", "sdpa"),
        ("tpu_fused_experts", "tpu_attention"),
    ]
    layer = (
        256 * (4 + 2 + 2 + 4) * 128 + 8 * 256 + 4 * 3 * 256 * 256
    )  # attention, router, half of the experts
    cache = 2 * 8 * 2 * 256 * 128
    for row in projected.rows:
        assert row.not_projected is None
        assert 0 < row.floor_ms <= row.device_ms.low <= row.device_ms.high <= row.worst_ms
        assert row.step_ms.low == pytest.approx(row.device_ms.low + row.host_ms.low)
        assert row.step_ms.high == pytest.approx(row.worst_ms + row.host_ms.high)
        assert row.tokens_per_s.low == pytest.approx(8e3 / row.step_ms.high)
        needed = 2 * (4 * (layer + cache) + 2 * 1024 * 256)
        assert needed < row.hbm_bytes < 1.3 * needed + 2**24  # tiles pad, and programs take some
        assert row.fits
        assert {"attention", "experts", "head", "exchange"} <= row.where.keys()
    # What the core is busy with is in the step, whatever hides behind it.
    for row in projected.rows:
        assert sum(row.where.values()) < row.device_ms.high + 0.01


def test_copies_of_weights_are_found_where_they_are(projected):
    stock, ours = projected.rows
    assert any("each pair's expert weights are copied, bf16[16,512,256]" in text for text in stock.findings)
    assert not any("copied" in text for text in ours.findings)


def test_a_projection_is_kept(folder, projected, monkeypatch):
    def export(*args):
        raise AssertionError("it is projected already")

    monkeypatch.setattr(projection, "export_in_process", export)
    assert project(folder, **PLAN, experts=EXPERTS) == projected


def test_the_command_prints_it(folder, projected):
    arguments = ["project", str(folder), "--tpu", "v6e-4", "--parallel", "ep2", "--batch", "8"]
    arguments += ["--context", "256", "--experts", ",".join(EXPERTS)]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0
    assert "PROJECTED from the compiler's schedules, not measured" in shown.stdout
    assert "stated, not simulated:" in shown.stdout
    printed = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert printed["evidence"] == "projected"
    assert [row["batch"] for row in printed["rows"]] == [8, 8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parallel": "ep8"}, "ep8 needs 8 devices, and v6e-4 has 4"),
        ({"parallel": "8"}, "is no parallel plan"),
        ({"batches": (0,)}, "must be whole numbers of at least 1"),
    ],
)
def test_what_cannot_be_projected_is_refused(folder, arguments, message):
    with pytest.raises(ProjectionError, match=message):
        project(folder, **{**PLAN, **arguments})


def test_without_a_config_there_is_a_way_out(tmp_path):
    with pytest.raises(ProjectionError, match="give a model's folder, its config"):
        project(tmp_path / "nothing")


def test_xla_ops_take_what_their_schedules_say():
    """An op that only reads and writes memory takes what its bytes do at the bandwidth that is attained."""
    array = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
    job = analysis.Job(lambda x: x * 2 + 1, (array,), "v6e", every_schedule=True)
    [report] = analysis.compile_many([job])
    calibration = load_calibration("v6e")
    times = op_times(report, calibration)
    moved_us = 2 * 8192 * 4096 * 2 / calibration.memory.attainable_gbps / 1e3
    assert sum(time.hbm_bytes for time in times) == 2 * 8192 * 4096 * 2
    assert bounds_of(times, calibration).low == pytest.approx(moved_us, rel=0.1)
    assert all(time.followed for time in times)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gemma-4-26b-a4b"])
def test_real_models_are_projected_in_time(configs, name):
    started = time.monotonic()
    result = project(configs / name)
    cold, started = time.monotonic() - started, time.monotonic()
    assert project(configs / name) == result
    assert cold < 600
    assert time.monotonic() - started < 20
    assert all(row.not_projected is None and row.fits for row in result.rows)
    assert {comparison.batch for comparison in result.comparisons} >= {1, 64}
    for ratio in result.ratios:
        assert 1 < ratio.device.low <= ratio.device.high < 5
