"""The model that a benchmark runs, checked and loaded."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BenchmarkError, TpuKernelsError, first_line
from ..integrations.distributed import distributed_config
from ..integrations.transformers import disable, enable, is_dispatched
from ..projection.plan import ONE_CHIP, ParallelPlan
from . import memory, presets, prompts
from .placement import Placement
from .results import STOCK, DecodeConfig, split_arm

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

PRESET_PREFIX = "preset:"

_WEIGHT_FILES = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class Subject:
    """A model on its device, with the prompts it is run on.

    Attributes:
        model: Loaded with no experts implementation asked for.
        placement: Its device.
        prompts: Token ids by batch size, on the CPU: `generate` moves what its forward consumes.
        stock_experts: The implementation transformers chose, of the model and each of its parts.
        dispatches_experts: Whether the model has experts whose implementation can be switched.
        description: The model in words.
    """

    model: PreTrainedModel
    placement: Placement
    prompts: Mapping[int, torch.Tensor]
    stock_experts: Mapping[str, str | None]
    dispatches_experts: bool
    description: str

    def use(self, arm: str) -> None:
        """Switches the model's experts to those of `arm`."""
        experts, _ = split_arm(arm)
        if self.dispatches_experts:
            self.model.set_experts_implementation(self.stock_experts if experts == STOCK else experts)
        elif experts != STOCK:
            # transformers would accept the name and change nothing: the figures would be the stock ones.
            raise BenchmarkError("the model has no experts whose implementation can be switched")

    def runs_as(self, arm: str) -> str:
        """What really computes `arm`, which must be registered."""
        experts, loop = split_arm(arm)
        by = ", tpu_kernels.generate" if loop else ""
        if experts == STOCK and not self.dispatches_experts:
            return "the model's own code" + by
        names = sorted(filter(None, set(self.stock_experts.values()))) if experts == STOCK else [experts]
        return ", ".join(name + self._aside(name) for name in names) + by

    def _aside(self, name: str) -> str:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        if name == "grouped_mm" and self.placement.torch_device != "cpu":
            return ", batched_mm while decoding"  # `generate` swaps them, off the CPU
        explain = getattr(ALL_EXPERTS_FUNCTIONS.get(name), "explain", None)
        if explain is None:
            return ""
        # An experts function may take a slower path for some modules, and says which and why.
        paths = {explain(module) for module in self.model.modules() if is_dispatched(module)}
        told = sorted(": ".join(filter(None, (p.name, p.reason))) for p in paths)
        return f" ({'; '.join([*told, *_what_ran(explain)])})"


@contextlib.contextmanager
def experts_registered(arms: Sequence[str]) -> Iterator[None]:
    """Makes transformers know every arm's name, for as long as it takes, or refuses the first it cannot."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def missing() -> list[str]:
        names = [experts for experts, _ in map(split_arm, arms)]
        return [name for name in names if name not in (STOCK, "eager") and name not in ALL_EXPERTS_FUNCTIONS]

    with contextlib.ExitStack() as stack:
        if missing():
            enable()
            stack.callback(disable)
        if unknown := missing():
            known = ", ".join([STOCK, "eager", *sorted(ALL_EXPERTS_FUNCTIONS.keys())])
            raise BenchmarkError(f"there is no experts implementation {unknown[0]!r}; choose from {known}")
        yield


def load(config: DecodeConfig, placement: Placement) -> Subject:
    """Loads the model that `config` names on its device, after checking that it can run what is asked."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    text = prompts.read_text(config.prompt_file)
    with _source(config.model) as source, _load_errors(config.model):
        model_config = AutoConfig.from_pretrained(source)
        tokenizer = AutoTokenizer.from_pretrained(source)
        dtype = _own_dtype(model_config) if config.dtype == "auto" else getattr(torch, config.dtype)
        # Prefill makes the first new token, and the last is not read back: each step takes one position.
        length = config.prompt_length + config.new_tokens
        _check_positions(config, model_config, length)
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        rows = {
            batch: torch.tensor(prompts.cut_rows(tokens, batch, config.prompt_length))
            for batch in config.batches
        }
        capacity = placement.memory_bytes()
        if capacity is not None:
            memory.check_fits(
                model_config, config.batches, length, dtype, capacity, placement.description, placement.plan
            )
        model = _model(source, dtype, placement.torch_device, placement.plan)

    # The checkpoint's sampling and end-of-text defaults would change what a step does and how many there are.
    model.generation_config = GenerationConfig()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    traits = (f"{parameters:,} parameters", str(dtype).removeprefix("torch."), f"attention {attention}")
    return Subject(
        model=model,
        placement=placement,
        prompts=rows,
        stock_experts=model.get_experts_implementation(),
        dispatches_experts=any(map(is_dispatched, model.modules())),
        description=", ".join((type(model).__name__, *traits)),
    )


def load_model(name: str, dtype: str, device: str) -> PreTrainedModel:
    """The causal language model that is called `name`, as in `DecodeConfig`, on `device`."""
    import torch
    from transformers import AutoConfig

    with _source(name) as source, _load_errors(name):
        own = dtype == "auto"
        return _model(
            source, _own_dtype(AutoConfig.from_pretrained(source)) if own else getattr(torch, dtype), device
        )


def _model(
    source: str | Path, dtype: torch.dtype, device: str, plan: ParallelPlan = ONE_CHIP
) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    if plan.chips > 1:
        split = distributed_config(source, str(plan))
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype, distributed_config=split).eval()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device).eval()
    # Moving to a TPU replaces each module's parameters, and so parts an embedding from its tied head.
    model.tie_weights()
    return model


def _what_ran(function: Callable[..., object]) -> list[str]:
    """By which path the ops of the kernel that `function` belongs to ran in this process, if they did."""
    kernel = sys.modules[function.__module__.partition(".")[0]]
    ran: Counter[str] = sum((op.paths for op in vars(kernel).values() if hasattr(op, "paths")), Counter())
    return [f"ops {' and '.join(sorted(ran))}"] if ran else []


@contextlib.contextmanager
def _source(model: str) -> Iterator[str | Path]:
    """What `from_pretrained` takes for `model`: a preset is built for as long as it takes to load it."""
    if model.startswith(PRESET_PREFIX):
        with tempfile.TemporaryDirectory(prefix="tpu-kernels-") as built:
            yield presets.build(model.removeprefix(PRESET_PREFIX), built)
        return
    folder = Path(model).expanduser()
    if not folder.is_dir():
        # A Hub id is one organisation and one name; anything else can only have been meant as a path.
        if model.startswith(("/", ".", "~")) or model.count("/") > 1:
            raise BenchmarkError(
                f"there is no folder {model}; give a model's folder, its Hub id or preset:NAME"
            )
        yield model
        return
    if not (folder / "config.json").is_file():
        raise BenchmarkError(f"{model} has no config.json, so it is not a model's folder; give one that is")
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHT_FILES):
        raise BenchmarkError(
            f"{model} has a config.json but no weights ({', '.join(_WEIGHT_FILES)}); add them"
        )
    yield folder


@contextlib.contextmanager
def _load_errors(model: str) -> Iterator[None]:
    """Turns what transformers raises for a missing or malformed model into one line."""
    try:
        yield
    except TpuKernelsError:
        raise
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"the model {model} cannot be loaded: {first_line(error)}") from error


def _own_dtype(model_config: PreTrainedConfig) -> torch.dtype:
    """The dtype a checkpoint says it is in; a model of several parts may say so only for its text part."""
    import torch

    return model_config.dtype or model_config.get_text_config(decoder=True).dtype or torch.float32


def _check_positions(config: DecodeConfig, model_config: PreTrainedConfig, length: int) -> None:
    limit = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise BenchmarkError(
            f"prompt length {config.prompt_length} and {config.new_tokens} steps take {length} positions, "
            f"but {config.model} has {limit}; ask for fewer"
        )
