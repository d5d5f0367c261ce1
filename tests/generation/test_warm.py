import copy
import dataclasses
import pickle

import pytest
import torch
from typer.testing import CliRunner

import tpu_kernels
from tpu_kernels import cli
from tpu_kernels.errors import GenerationError
from tpu_kernels.generation.programs import Key, Programs
from tpu_kernels.generation.sampling import Sampling

from .conftest import GREEDY

VARIABLE = "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"


@pytest.mark.device
def test_what_was_warmed_compiles_nothing_more(load, device):
    model = load("mixtral", device)
    compiled = tpu_kernels.warm(model, batches=[2], prompts=[30], lengths=[100], **GREEDY)
    steps = [(each.key.step, each.key.tokens, each.key.cache_length) for each in compiled]
    assert steps == ([("first prefill", 32, 128), ("decode", 16, 128)] if device == "tpu" else [])

    for columns, new in ((20, 90), (31, 70)):
        tpu_kernels.generate(model, torch.ones(2, columns, dtype=torch.int64), **GREEDY, max_new_tokens=new)

    assert Programs.of(model).compilations == list(compiled)


def test_a_graph_more_says_why(model):
    programs = Programs(model)
    key = Key("decode", 1, 16, 128, Sampling(), 1, "grouped_mm", "sdpa")
    assert programs._cause(key) == "the first of its kind"
    programs._compiled = {key: None, dataclasses.replace(key, step="first prefill", batch=8): None}
    assert programs._cause(dataclasses.replace(key, batch=8)) == "another batch than 1"
    longer = dataclasses.replace(key, cache_length=256, experts="tpu_fused_experts")
    assert programs._cause(longer) == "another cache length than 128; another experts than grouped_mm"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_has_graphs_of_its_own(model, copied):
    own = Programs.of(model)
    assert Programs.of(model) is own
    other = copied(model)
    assert Programs.of(other) is not own
    tpu_kernels.generate(other, torch.ones(1, 4, dtype=torch.int64), **GREEDY, max_new_tokens=2)


def test_a_length_without_room_for_an_answer_is_refused(model):
    with pytest.raises(GenerationError, match=r"64 positions has no room for a prompt of 60 .* at least 128"):
        tpu_kernels.warm(model, batches=[1], prompts=[60], lengths=[64])


def test_the_command_says_where_it_keeps_what_it_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "elsewhere")  # to be put back
    arguments = [
        "warm",
        "preset:mixtral",
        "--device",
        "cpu",
        "--length",
        "256",
        "--cache",
        str(tmp_path / "xla"),
    ]
    outcome = CliRunner().invoke(cli.app, arguments)
    assert outcome.exit_code == 0, outcome.output
    assert f"{VARIABLE}={tmp_path / 'xla'}" in outcome.stdout.replace("\n", "")
