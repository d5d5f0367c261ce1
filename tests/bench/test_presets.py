from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tpu_kernels.bench.presets import PRESETS, build
from tpu_kernels.bench.prompts import cut_rows, read_text
from tpu_kernels.errors import BenchmarkError

NAMES = sorted(PRESETS)
LAYER_TYPES = {
    "gemma4": {"sliding_attention", "full_attention"},
    "gpt-oss": {"sliding_attention", "full_attention"},
    "qwen3-next": {"linear_attention", "full_attention"},
    "qwen3.5-moe": {"linear_attention", "full_attention"},
}


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(request.param, tmp_path_factory.mktemp("presets") / request.param)


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def prompts(folder: Path) -> torch.Tensor:
    tokens = AutoTokenizer.from_pretrained(folder)(read_text(None)).input_ids
    assert bytes(tokens).decode() == read_text(None)
    return torch.tensor(cut_rows(tokens, rows=4, length=48))


def test_it_loads_as_the_family_it_is_of(folder: Path, model: PreTrainedModel) -> None:
    preset = PRESETS[folder.name]
    assert model.config.model_type == preset.model_type
    assert model.dtype == torch.float32
    assert set(getattr(model.config, "layer_types", None) or ()) == LAYER_TYPES.get(folder.name, set())
    assert sum(parameter.numel() for parameter in model.parameters()) < 2_000_000


def test_the_same_seed_gives_the_same_weights(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)  # whatever state the process is in
    again, other = build(folder.name, tmp_path / "again"), build(folder.name, tmp_path / "other", seed=1)
    weights = (folder / "model.safetensors").read_bytes()
    assert (again / "model.safetensors").read_bytes() == weights
    assert (other / "model.safetensors").read_bytes() != weights


def test_building_leaves_the_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build("mixtral", tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_greedy_decoding_is_no_loop(model: PreTrainedModel, prompts: torch.Tensor) -> None:
    new = model.generate(prompts, max_new_tokens=32, min_new_tokens=32, do_sample=False)[:, 48:]
    assert all(len(set(row)) >= 12 for row in new.tolist())
    assert len({tuple(row) for row in new.tolist()}) == len(prompts)


def test_every_layer_spreads_tokens_over_its_experts(model: PreTrainedModel, prompts: torch.Tensor) -> None:
    used: dict[str, set[int]] = {}
    experts = {
        name: module for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")
    }
    assert len(experts) == model.config.num_hidden_layers
    for name, module in experts.items():
        module.register_forward_pre_hook(
            lambda module, args, name=name: used.setdefault(name, set()).update(args[1].flatten().tolist())
        )
    model(prompts)
    for name, module in experts.items():
        assert len(used[name]) > module.num_experts / 2, name


def test_no_bias_is_zero(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.abs().max() > 0, name


def test_expert_counts_differ_between_families() -> None:
    counts = [s.get("num_experts") or s["num_local_experts"] for s in (p.settings for p in PRESETS.values())]
    assert sorted(set(counts)) == [8, 16, 32]


def test_another_dtype(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(build("mixtral", tmp_path, dtype=torch.bfloat16))
    assert model.dtype == torch.bfloat16


def test_an_unknown_name_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"no preset 'qwen'; choose one of qwen3-moe, mixtral, gpt-oss"):
        build("qwen", tmp_path)
    assert not list(tmp_path.iterdir())
