import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from tpu_kernels import device, emulation
from tpu_kernels.bench import decode, memory, placement, presets
from tpu_kernels.bench.placement import Placement
from tpu_kernels.bench.results import DecodeConfig, DecodeResult, Difference, Summary
from tpu_kernels.bench.tokenizer import build_tokenizer
from tpu_kernels.errors import BenchmarkError, DeviceError, EmulationError, TpuKernelsError

SMALL = DecodeConfig(
    "preset:mixtral",
    experts=("eager", "stock"),
    batches=(1, 3),
    prompt_length=16,
    new_tokens=5,
    repeats=2,
    device="cpu",
)


class KernelPath(NamedTuple):
    name: str
    reason: str


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return presets.build("mixtral", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def result() -> DecodeResult:
    phases: list[str] = []
    result = decode.run(SMALL, phases.append)
    assert len(phases) == SMALL.phases == 12
    assert phases[:2] == ["eager, batch 1: first run", "eager, batch 1: run 1 of 2"]
    return result


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], None]:
    """Registers an experts implementation for one test."""

    def register(name: str, function: Any) -> None:
        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, name, function)

    return register


def test_every_arm_is_measured_at_every_batch(result: DecodeResult) -> None:
    assert [(arm.experts, arm.batch) for arm in result.arms] == [
        ("eager", 1),
        ("eager", 3),
        ("stock", 1),
        ("stock", 3),
    ]
    for arm in result.arms:
        measurement = arm.measurement
        assert measurement is not None
        assert arm.not_run is None
        assert [len(steps) for steps in measurement.step_samples_ms] == [5, 5]
        assert len(measurement.prefill_samples_ms) == 2
        assert min(measurement.prefill_samples_ms) > 0
        speeds = [arm.batch * 5 / (sum(steps) / 1e3) for steps in measurement.step_samples_ms]
        assert math.isclose(measurement.tokens_per_s.median, sum(speeds) / 2)
        assert measurement.host_ms.low > 0
        assert measurement.first_run_s > 0


def test_arms_make_the_same_tokens(result: DecodeResult) -> None:
    measurements = [arm.measurement for arm in result.arms]
    assert {(m.reference, m.difference) for m in measurements if m} == {("stock", None)}


def test_cpu_time_is_called_just_that(result: DecodeResult) -> None:
    assert result.evidence == "cpu"
    assert result.device.startswith("CPU")
    assert result.caution is not None
    assert "not TPU speeds" in result.caution
    assert {arm.runs_as for arm in result.arms} == {"eager", "grouped_mm"}
    assert {arm.measurement.graphs for arm in result.arms if arm.measurement} == {0}


def test_json_carries_everything(result: DecodeResult) -> None:
    document = json.loads(result.to_json())
    assert document["schema"] == 2
    assert document["evidence"] == "cpu"
    assert "not TPU speeds" in document["caution"]
    assert document["config"]["batches"] == [1, 3]
    assert document["versions"]["torch"] == torch.__version__
    assert set(document["versions"]) == {
        *("python", "torch", "torch_tpu", "jax", "libtpu", "transformers", "tpu_kernels")
    }
    assert len(document["arms"][3]["measurement"]["step_samples_ms"][1]) == 5


def test_json_is_read_back(result: DecodeResult) -> None:
    assert DecodeResult.from_json(result.to_json()) == result
    for text, message in (
        ("nothing", "no result of bench decode"),
        ("{}", "schema is None, but this release reads 2"),
        ('{"schema": 2}', "no result"),
    ):
        with pytest.raises(BenchmarkError, match=message):
            DecodeResult.from_json(text)


def test_our_loop_is_an_arm() -> None:
    config = dataclasses.replace(SMALL, experts=("stock", "stock+loop"), batches=(2,), new_tokens=20)
    stock, ours = decode.run(config).arms
    assert stock.measurement is not None
    assert ours.measurement is not None
    assert ours.runs_as == "grouped_mm, tpu_kernels.generate"
    assert ours.measurement.difference is None
    assert [len(steps) for steps in ours.measurement.step_samples_ms] == [2, 2], "a dispatch of 16, one of 4"
    assert len(stock.measurement.step_samples_ms[0]) == 20


def test_an_arm_that_fails_is_not_a_number(experts: Callable[[str, Any], None]) -> None:
    def broken(module: Any, *args: Any) -> None:
        raise NotImplementedError("only on [green] devices\nand a trace")

    experts("broken", broken)
    phases: list[str] = []
    config = dataclasses.replace(SMALL, experts=("broken", "eager"), batches=(1,))
    failed, fine = decode.run(config, phases.append).arms
    assert failed.measurement is None
    assert failed.not_run == "NotImplementedError: only on [green] devices"
    assert fine.measurement is not None
    assert fine.measurement.reference == "eager"
    assert len(phases) == config.phases


def test_wrong_tokens_are_found(experts: Callable[[str, Any], None]) -> None:
    experts("negative", lambda *args: -grouped_mm_experts_forward(*args))
    config = dataclasses.replace(SMALL, experts=("stock", "negative"), batches=(2,))
    _, wrong = decode.run(config).arms
    assert wrong.measurement is not None
    assert wrong.measurement.difference is not None


def test_an_arm_that_takes_another_path_says_so(experts: Callable[[str, Any], None]) -> None:
    def function(*args: Any) -> Any:
        return grouped_mm_experts_forward(*args)

    function.explain = lambda module: KernelPath("composed", "it has [biases]")  # type: ignore[attr-defined]
    experts("explained", function)
    config = dataclasses.replace(SMALL, experts=("explained",), batches=(1,), repeats=1)
    assert decode.run(config).arms[0].runs_as == "explained (composed: it has [biases])"


def test_the_first_difference_is_the_earliest_in_time() -> None:
    tokens = torch.zeros(3, 4)
    other = tokens.clone()
    other[0, 3] = other[1, 2] = other[2, 2] = 1
    assert decode._first_difference(tokens, other) == Difference(row=1, position=2)
    assert decode._first_difference(tokens, tokens) is None


def test_a_model_without_experts_runs_only_as_stock(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    asked = dataclasses.replace(
        SMALL, model=str(tmp_path), experts=("stock", "eager"), batches=(1,), repeats=1
    )
    stock, eager = decode.run(asked).arms
    assert stock.measurement is not None
    assert stock.runs_as == "the model's own code"
    assert eager.measurement is None
    assert eager.not_run == "the model has no experts whose implementation can be switched"


def test_experts_are_registered_only_while_they_run() -> None:
    config = dataclasses.replace(SMALL, experts=("tpu_ragged_dot",), batches=(1,), repeats=1)
    (arm,) = decode.run(config).arms
    assert arm.measurement is not None
    assert arm.runs_as == "tpu_ragged_dot (fused; ops cpu)"
    assert "tpu_ragged_dot" not in ALL_EXPERTS_FUNCTIONS
    known = r"stock, eager, ba.*tpu_grouped_mm, tpu_ragged_dot"
    with pytest.raises(BenchmarkError, match=f"no experts implementation 'theirs'; choose from {known}"):
        decode.run(dataclasses.replace(config, experts=("theirs",)))
    assert "tpu_ragged_dot" not in ALL_EXPERTS_FUNCTIONS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": (1, 0)}, "batch is 0; it must be at least 1"),
        ({"batches": ()}, "batch is empty; give at least one"),
        ({"batches": (2, 1, 2)}, "batch 2,1,2 names one twice"),
        ({"experts": ("eager", "eager")}, "experts eager,eager names one twice"),
        ({"new_tokens": 0}, "new tokens is 0; it must be at least 1"),
        ({"prompt_length": -1}, "prompt length is -1; it must be at least 1"),
        ({"repeats": 0}, "repeats is 0; it must be at least 1"),
        ({"device": "gpu"}, "there is no device 'gpu'; choose one of auto, tpu, emulated, cpu"),
        ({"dtype": "int4"}, "there is no dtype 'int4'; choose one of auto, float32, bfloat16"),
        ({"model": "preset:gpt-5"}, "there is no preset 'gpt-5'; choose one of qwen3-moe, mixtral"),
        ({"model": "./nowhere"}, "there is no folder ./nowhere"),
        ({"prompt_length": 4095}, "take 4100 positions, but preset:mixtral has 4096; ask for fewer"),
        (
            {"batches": (4000,)},
            r"text has 3\d+ tokens, but batch 4000 with prompt length 16 needs 4015; give a",
        ),
        ({"prompt_file": Path("nowhere.txt")}, r"nowhere.txt cannot be read \(No such file or directory\)"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchmarkError, match=message) as raised:
        decode.run(dataclasses.replace(SMALL, **changes))
    assert "\n" not in str(raised.value)


def test_a_folder_without_a_model_is_refused(mixtral: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, model=str(tmp_path))
    with pytest.raises(BenchmarkError, match=r"has no config\.json"):
        decode.run(config)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BenchmarkError, match=r"has a config\.json but no weights"):
        decode.run(config)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(BenchmarkError, match=r"cannot be loaded: ValueError: "):
        decode.run(config)


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"caf\xe9")
    with pytest.raises(BenchmarkError, match=r"is not UTF-8 text \(byte 3\)"):
        decode.run(dataclasses.replace(SMALL, prompt_file=file))


def test_prompts_come_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("é" * 100)
    config = dataclasses.replace(SMALL, experts=("stock",), batches=(2,), repeats=1, prompt_file=file)
    assert decode.run(config).arms[0].measurement is not None


def test_a_batch_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # 1.8 MB of weights, and 16 + 5 positions of 512 bytes a sequence.
    monkeypatch.setattr(memory, "host_bytes", lambda: 2_000_000)
    decode.run(dataclasses.replace(SMALL, batches=(1,), repeats=1))
    with pytest.raises(BenchmarkError, match=r"batch 50 of 21 tokens needs .* use a batch of at most 14, or"):
        decode.run(dataclasses.replace(SMALL, batches=(1, 50)))
    monkeypatch.setattr(memory, "host_bytes", lambda: 1_000_000)
    with pytest.raises(BenchmarkError, match="use a smaller model or dtype"):
        decode.run(SMALL)


@pytest.mark.parametrize("name", sorted(presets.PRESETS))
def test_weights_and_cache_are_counted_exactly(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(presets.build(name, tmp_path))
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert memory.weight_bytes(model.config, torch.float32) == parameters + buffers

    prompt = torch.ones(2, 40, dtype=torch.long)
    output = model.generate(
        prompt, max_new_tokens=9, cache_implementation="static", return_dict_in_generate=True, do_sample=False
    )
    cache = getattr(output, "cache", None) or output.past_key_values
    states = [getattr(layer, state, None) for layer in cache.layers for state in ("keys", "values")]
    allocated = sum(state.nbytes for state in states if state is not None)
    assert memory.cache_bytes(model.config, 2, 48, torch.float32) == allocated


def test_the_clock_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it starts, for what was queued; before it stops, for the run; a step's token comes by way of the host."""
    events: list[str] = []

    def clock() -> float:
        events.append("clock")
        return float(len(events))

    def generate(prompt: torch.Tensor, *, streamer: Any, **_: Any) -> torch.Tensor:
        events.append("generate")
        for tokens in (prompt, prompt, prompt):
            streamer.put(tokens)
        return prompt.repeat(1, 2)

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: events.append("synchronize"))
    monkeypatch.setattr(decode.time, "perf_counter", clock)
    subject = SimpleNamespace(
        placement=Placement("tpu", "measured", "TPU v6e, 1 chip"),
        prompts={1: torch.ones(1, 2, dtype=torch.int64)},
        model=SimpleNamespace(generate=generate),
    )
    decode._generate(cast(Any, subject), "stock", 1, dataclasses.replace(SMALL, new_tokens=1))
    assert events == ["synchronize", "clock", "generate", "clock", "clock", "clock", "synchronize", "clock"]


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    here = device.Device("cpu", None, chips=0)
    monkeypatch.setattr(device, "current", lambda: here)
    with pytest.raises(DeviceError, match="tpu was asked for, but here is no TPU; choose emulated or cpu"):
        placement.place("tpu")
    here = device.Device("emulated", None, chips=1)
    with pytest.raises(DeviceError, match="here is emulated TPU, on the CPU; choose emulated or cpu"):
        placement.place("tpu")
    assert placement.place("auto").evidence == "emulated"
    here = device.Device("tpu", "v6e", chips=1)
    assert (
        placement.place("auto") == placement.place("tpu") == Placement("tpu", "measured", "TPU v6e, 1 chip")
    )


def test_auto_falls_back_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current", lambda: device.Device("cpu", None, chips=0))

    def install() -> None:
        raise EmulationError("no plugin")

    monkeypatch.setattr(emulation, "install", install)
    assert placement.place("auto").evidence == "cpu"
    with pytest.raises(EmulationError, match="no plugin"):
        placement.place("emulated")


def test_a_recompile_limit_is_noticed_and_not_printed(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    logger = logging.getLogger("torch._dynamo.convert_frame")
    with decode._recompile_limit_hits() as hits:
        logger.warning("torch._dynamo hit config.%s (%s)", "recompile_limit", 8)
        logger.warning("something else")
    assert hits == ["torch._dynamo hit config.recompile_limit (8)"]
    assert not any("hit config" in message for message in caplog.messages)


def test_summaries() -> None:
    assert Summary.of([7.0]) == Summary(7.0, 7.0, 7.0)
    assert Summary.of([1.0, 2.0, 3.0, 4.0, 100.0]) == Summary(3.0, 2.0, 4.0)


def test_all_refusals_are_of_the_family() -> None:
    assert issubclass(BenchmarkError, TpuKernelsError)
    assert issubclass(DeviceError, TpuKernelsError)
