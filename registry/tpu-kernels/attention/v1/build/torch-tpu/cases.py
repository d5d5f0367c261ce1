"""Named cases: the decode steps of real models, shared by tests, benchmarks and tuning."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention layer of a model in a decode step, on one chip.

    Attributes:
      name: model, kind of layer, and how its heads are spread.
      heads, kv_heads: query heads and kv heads, those that are here.
      head_dim: D, of keys and values.
      window: a token sees at most so many keys.
      sinks: each query head has one.
      softcap: of the scores.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None

    def call(
        self, sequences: int, keys: int, new: int = 1, dtype: str = "bfloat16"
    ) -> tuple[dict[str, tuple[tuple[int, ...], str]], dict[str, Any]]:
        """The op's arrays by name, as shape and dtype, and its other arguments."""
        cache = (sequences, self.kv_heads, keys, self.head_dim), dtype
        arrays: dict[str, tuple[tuple[int, ...], str]] = {
            "query": ((sequences, self.heads, new, self.head_dim), dtype),
            "key": cache,
            "value": cache,
            "lengths": ((sequences,), "int32"),
        }
        if self.sinks:
            arrays["sinks"] = ((self.heads,), dtype)
        return arrays, {"scale": self.head_dim**-0.5, "window": self.window, "softcap": self.softcap}


# From the models' published configurations.
CASES: tuple[Case, ...] = (
    Case("qwen3-30b-a3b", 32, 4, 128),
    Case("qwen3-30b-a3b-tp4", 8, 1, 128),
    Case("llama-3.1-8b", 32, 8, 128),
    Case("gpt-oss-20b-full", 64, 8, 64, sinks=True),
    Case("gpt-oss-20b-sliding", 64, 8, 64, window=128, sinks=True),
    Case("gemma-4-26b-a4b-sliding", 16, 8, 256, window=1024),
    Case("gemma-4-26b-a4b-full", 16, 2, 512),
    Case("gemma-2-9b-full", 16, 8, 256, softcap=50.0),
    Case("phi-3-mini", 32, 32, 96),
    Case("stablelm-3b", 32, 32, 80),
)

# Keys of each sequence in a decode step of a workload, whose name tells the sequences only.
CONTEXT = 4096


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of one of the kernel's ops.

    Attributes:
      op: name of the op.
      part: which kind of layer it is, or the call's name.
      arguments: arrays by name: a pair of shape and dtype, or integers that count.
      static: other arguments.
    """

    op: str
    part: str
    arguments: dict[str, Any]
    static: dict[str, Any]


def _step(case: Case, lengths: list[int], keys: int, new: int = 1, dtype: str = "bfloat16") -> Call:
    arguments, static = case.call(len(lengths), keys, new, dtype)
    return Call("decode_attention", case.name, {**arguments, "lengths": lengths}, static)


def _append(case: Case, lengths: list[int], keys: int, new: int = 1, dtype: str = "bfloat16") -> Call:
    step = _step(case, lengths, keys, new, dtype)
    rows = (len(lengths), case.kv_heads, new, case.head_dim), dtype
    return Call(
        "append_attention", case.name, {**step.arguments, "new_key": rows, "new_value": rows}, step.static
    )


def _pass(case: Case, queries: int, dtype: str) -> Call:
    arguments, static = case.call(1, queries, queries, dtype)
    del arguments["lengths"]
    return Call("flash_attention", case.name, arguments, {**static, "causal": True})


def examples() -> list[Call]:
    """Small calls, whose results `tpu-kernels check` compares with the reference."""
    return [
        _append(Case("rows", 2, 1, 128), [5, 0], 16, dtype="float32"),
        _append(Case("columns", 3, 1, 64, window=30, sinks=True), [129], 130, new=3),
        _pass(Case("causal", 2, 1, 128), 20, "float32"),
        _step(Case("grouped", 8, 4, 128), [5, 0, 272], 272, dtype="float32"),
        _step(Case("sliding", 6, 2, 64, window=130, sinks=True), [384, 17], 384, new=3),
        _step(Case("capped", 4, 1, 80, softcap=5.0), [130, 200, 1], 200, new=2, dtype="float32"),
    ]


def benchmarks() -> list[Call]:
    """Decode steps of real models: 8 sequences, of lengths up to 4096."""
    lengths = [4096, 3011, 257, 1800, 1, 3600, 2048, 900]
    return [_step(case, lengths, 4096) for case in CASES]


def calls(workload: Any) -> list[Call]:
    """A model's attention layers in bf16, one of each kind, for `tpu-kernels compile` and `simulate`.

    Args:
      workload: `phase`; `tokens`: in `decode` the sequences, each with `CONTEXT` keys, else the length of one
        sequence; `attention`: the kinds of layers, each with `name`, `heads`, `kv_heads`, `head_dim`, `window` and
        `sinks`, as in `tpu_kernels.analysis`.
    """
    found = []
    for layer in workload.attention:
        case = Case(layer.name, layer.heads, layer.kv_heads, layer.head_dim, layer.window, layer.sinks)
        arguments: dict[str, Any]
        if workload.phase == "decode":
            arguments, static = case.call(workload.tokens, CONTEXT)
            arguments["lengths"] = [CONTEXT] * workload.tokens
            found.append(Call("decode_attention", layer.name, arguments, static))
            continue
        arguments, static = case.call(1, workload.tokens, workload.tokens)
        del arguments["lengths"]
        found.append(Call("flash_attention", layer.name, arguments, {**static, "causal": True}))
    return found
