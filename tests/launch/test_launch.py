"""`tpu-kernels run`: the same tokens over ranks as in one process; a rank that ends badly ends the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import tpu_kernels
from tpu_kernels.bench import presets
from tpu_kernels.errors import IntegrationError, LaunchError, ProjectionError
from tpu_kernels.launch import launch

HERE = Path(__file__).parent
FAMILIES = ("qwen3-moe", "gpt-oss", "mixtral")
RUN = [sys.executable, "-c", "from tpu_kernels.cli import main; main()", "run"]


def run(*arguments: str | Path, timeout: float) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    return subprocess.run(
        [*RUN, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=environment,
    )


def tokens_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    prompt = torch.arange(5, 21).view(2, 8)
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False, pad_token_id=0
    )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_make_the_tokens_of_one_process(ranks, tmp_path):
    folders = [presets.build(family, tmp_path / family) for family in FAMILIES]
    folders.append(presets.build_mxfp4(tmp_path / "gpt-oss-mxfp4"))
    done = run(
        *("--nproc-per-node", str(ranks), "--device", "cpu", HERE / "generate.py"),
        *(*folders, tmp_path / "tokens"),
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(ranks):
        tokens = torch.load(tmp_path / f"tokens.{rank}")
        for folder in folders:
            assert torch.equal(tokens[str(folder)], tokens_of(folder))


def test_a_killed_rank_ends_the_others_with_a_message(tmp_path):
    note = tmp_path / "killed"
    done = run("--nproc-per-node", "2", "--device", "cpu", HERE / "killed.py", note, timeout=500)
    assert time.time() - float(note.read_text()) < 60  # others would wait for it for half an hour
    assert done.returncode == 2
    assert "error: rank 1 (process " in done.stderr
    assert "ended with signal SIGKILL; the other ranks were ended with it" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": "gpu"}, "there is no device 'gpu'; choose one of auto, tpu, cpu"),
        ({"target": "cpu", "nproc_per_node": 0}, "--nproc-per-node is 0; it must be at least 1"),
        ({"target": "tpu"}, "there is no TPU on this machine; give --device cpu"),
    ],
)
def test_what_cannot_be_launched_is_refused(arguments, message, monkeypatch):
    monkeypatch.setattr("tpu_kernels.device.attached_chips", lambda: 0)
    with pytest.raises(LaunchError, match=message):
        launch(["script.py"], **arguments)


def test_more_ranks_than_chips_are_refused(monkeypatch):
    monkeypatch.setattr("tpu_kernels.device.attached_chips", lambda: 4)
    with pytest.raises(LaunchError, match=r"is 8, and this machine has 4 chips.*give at most 4"):
        launch(["script.py"], nproc_per_node=8)


def test_the_hosts_of_a_slice_are_known_by_its_environment(tmp_path):
    """torch_tpu's own launch environment, which needs no TPU for that."""
    of_slice = {"TPU_WORKER_HOSTNAMES": "host-a,host-b", "JOB_COMPLETION_INDEX": "1"}
    subprocess.run(
        [sys.executable, str(HERE / "slice_of_hosts.py"), str(tmp_path / "launched")],
        timeout=500,
        check=True,
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])} | of_slice,
    )
    options, count, addresses = json.loads((tmp_path / "launched").read_text())
    assert options == {"nnodes": "2", "node_rank": "1", "master_addr": "host-a", "master_port": "29500"}
    assert count == 4
    assert len(addresses) == 8


def test_impossible_splits_say_what_is_possible(tmp_path):
    folder = presets.build("qwen3-moe", tmp_path / "model")
    with pytest.raises(
        ProjectionError, match=r"2 key-value heads of self_attn .* over 4 chips.*ep4, or tp2ep2"
    ):
        tpu_kernels.distributed_config(folder, "tp4")
    with pytest.raises(ProjectionError, match="16 experts cannot be split over 3 chips"):
        tpu_kernels.distributed_config(folder, "ep3")
    with pytest.raises(IntegrationError, match="give ep4 or tp2"):
        tpu_kernels.distributed_config(folder, "tp2ep2")
    config = tpu_kernels.distributed_config(folder, "ep4")
    assert (config.tp_size, config.ep_size) == (4, 4)
