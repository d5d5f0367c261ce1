import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpu_kernels.bench import decode, ranks
from tpu_kernels.bench.placement import place
from tpu_kernels.bench.results import DecodeConfig
from tpu_kernels.errors import BenchmarkError, ProjectionError
from tpu_kernels.projection.plan import ParallelPlan

EP2 = DecodeConfig("preset:qwen3-moe", experts=("stock",), batches=(2,), device="cpu", parallel="ep2")


def test_a_plan_is_for_as_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        BenchmarkError, match=r"ep2 takes 2 ranks.* run --nproc-per-node 2 -m tpu_kernels bench"
    ):
        decode.run(EP2)
    with pytest.raises(ProjectionError, match="'both' is no parallel plan"):
        decode.run(dataclasses.replace(EP2, parallel="both"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        BenchmarkError, match=r"tp1 takes 1 ranks, but this is one of 2; .*: tpu-kernels bench"
    ):
        decode.run(dataclasses.replace(EP2, parallel="tp1"))
    with pytest.raises(BenchmarkError, match="emulated devices cannot exchange anything; give --device cpu"):
        decode.run(dataclasses.replace(EP2, device="emulated"))
    assert ranks.plan_of(EP2) == ParallelPlan(ep=2)


def test_ranks_share_the_memory_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpu_kernels.bench.memory.host_bytes", lambda: 1000)
    placement = place("cpu", ParallelPlan(tp=4))
    assert placement.memory_bytes() == 250
    assert placement.description.endswith("tp4 over 4 ranks")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ep2", "tp2"])
def test_two_ranks_report_once(plan: str, tmp_path: Path) -> None:
    report = tmp_path / "result.json"
    command = [sys.executable, "-m", "tpu_kernels", "run", "--nproc-per-node", "2", "--device", "cpu"]
    command += ["-m", "tpu_kernels", "bench", "decode", "--model", "preset:qwen3-moe", "--parallel", plan]
    command += ["--experts", "stock,stock+loop,tpu_fused_experts+loop", "--batch", "1,2", "--repeats", "1"]
    command += ["--prompt-length", "16", "--new-tokens", "20", "--json", str(report)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Decode of preset:qwen3-moe: CPU") == 1
    document = json.loads(report.read_text())
    assert document["device"].endswith(f"{plan} over 2 ranks")
    assert [arm["not_run"] for arm in document["arms"]] == [None] * 6
    assert all(arm["measurement"]["difference"] is None for arm in document["arms"])
