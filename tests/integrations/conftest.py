import functools
from pathlib import Path

import pytest
import torch
import transformers

import tpu_kernels
from tpu_kernels.bench import presets


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.device)


@pytest.fixture(autouse=True)
def _undo():
    yield
    tpu_kernels.disable()
    # Models share the code that generate compiles: one that reaches the recompile limit ends it for all.
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A family's small model, saved once."""
    built: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in built:
            make = _gemma2 if family == "gemma2" else functools.partial(presets.build, family)
            built[family] = make(tmp_path_factory.mktemp("models") / family)
        return built[family]

    return get


def _gemma2(folder: Path) -> Path:
    """A model with soft caps, which is no preset as it has no experts."""
    config = transformers.Gemma2Config(
        vocab_size=presets.VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, sliding_window=16,
        attn_logit_softcapping=5.0, max_position_embeddings=256,
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config)
    presets._randomise(model, 0)
    model.save_pretrained(folder)
    return folder
