import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin

from tpu_kernels.bench import presets
from tpu_kernels.generation import loop

GREEDY = {"do_sample": False}


def over(cache: Any) -> dict[str, Any]:
    """`cache` under the name that this version of transformers has for it."""
    names = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """For models this small, threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Loads a family's small model, on the CPU unless told otherwise."""
    folders: dict[str, Path] = {}

    def load(family: str, device: str = "cpu") -> Any:
        if family not in folders:
            folders[family] = presets.build(family, tmp_path_factory.mktemp("models") / family)
        model = AutoModelForCausalLM.from_pretrained(folders[family], device_map=device).eval()
        model.generation_config = GenerationConfig()
        return model

    return load


@pytest.fixture(scope="package")
def model(load: Callable[..., Any]) -> Any:
    return load("qwen3-moe")


@pytest.fixture(scope="package")
def prompts() -> dict[str, torch.Tensor]:
    """Three prompts, the first two padded on the left."""
    ids = torch.randint(3, 250, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[1, :11] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(autouse=True)
def fallbacks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[str]:
    """Reasons why transformers' own loop ran, which makes the same tokens: a test fails if it does not ask for them."""
    reasons: list[str] = []

    def note(message: str) -> None:
        assert wanted, message
        reasons.append(message)

    wanted = "fallbacks" in inspect.signature(request.function).parameters
    monkeypatch.setattr(loop, "warn_once", note)
    return reasons
