"""A model's steps, each compiled once for each shape, and why.

Axis letters: B sequences, L new tokens, S positions of the cache, T steps, V tokens of the vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .compilation import compile_step, donates
from .sampling import Sampling
from .steps import Forward, State, make_decode, make_prefill, returning

Program = Callable[..., Tensor]
"""What `steps` makes, a function of the state first of all, compiled."""


@dataclass(frozen=True)
class Key:
    """What a graph is compiled for."""

    step: str
    batch: int
    tokens: int
    cache_length: int
    sampling: Sampling
    stop_tokens: int
    experts: str
    attention: str


@dataclass(frozen=True)
class Compilation:
    """One graph that was compiled.

    Attributes:
      key: what for.
      cause: why those that were there did not serve, in words.
      seconds: of its first call.
    """

    key: Key
    cause: str
    seconds: float

    def __str__(self) -> str:
        key = self.key
        what = f"{key.step}, batch {key.batch}, {key.tokens} tokens, cache of {key.cache_length}"
        return f"{what}: {self.cause} ({self.seconds:.1f} s)"


class Programs:
    """The steps of one model, each compiled when it is first needed. On a CPU they run as they are.

    Attributes:
      compilations: every graph so far, in order.
    """

    def __init__(self, model: Any) -> None:
        self._forward = Forward(model)
        self._compiled: dict[Key, Program] = {}
        self.compilations: list[Compilation] = []

    @classmethod
    def of(cls, model: Any) -> Programs:
        """Those of `model`, kept with it."""
        programs: Programs | None = vars(model).get("_tpu_kernels_programs")
        if programs is None:
            programs = model._tpu_kernels_programs = cls(model)
        return programs

    def __reduce__(self) -> tuple[Any, ...]:
        """Nothing: a copied or saved model leaves them behind."""
        return type(None), ()

    def prefill(self, state: State, tokens: int, form: Sampling) -> Program:
        """The step that puts so many `tokens` of each prompt in the cache: `steps.make_prefill`."""
        step = "first prefill" if state.cache.batch is None else "further prefill"
        return self._program(step, state, tokens, form, lambda: make_prefill(self._forward, form))

    def decode(self, state: State, tokens: int, form: Sampling) -> Program:
        """The step that makes so many `tokens` of each sequence: `steps.make_decode`."""
        scanned = tokens > 1 and state.token.device.type == "tpu"
        return self._program("decode", state, tokens, form, lambda: make_decode(self._forward, form, scanned))

    def _program(
        self, step: str, state: State, tokens: int, form: Sampling, make: Callable[[], Callable[..., Tensor]]
    ) -> Program:
        if state.token.device.type != "tpu":
            return make()
        model = self._forward.model
        key = Key(
            step=step,
            batch=state.token.shape[0],
            tokens=tokens,
            cache_length=state.cache.max_cache_len,
            sampling=form,
            stop_tokens=state.ends.shape[0] - 1,
            experts=str(model.get_experts_implementation()),
            attention=str(model.config._attn_implementation),
        )
        program = self._compiled.get(key)
        if program is None:
            return functools.partial(self._compile, key, _compiled(make(), first=step == "first prefill"))
        return program

    def _compile(self, key: Key, program: Program, *arguments: Any) -> Tensor:
        started = time.perf_counter()
        # transformers has other experts for decoding than for prefill.
        decoding = self._forward.model._optimize_model_for_decode
        with decoding() if key.step == "decode" else contextlib.nullcontext():
            result = program(*arguments)
        seconds = time.perf_counter() - started
        if key not in self._compiled:
            self.compilations.append(Compilation(key, self._cause(key), seconds))
            self._compiled[key] = program
        return result

    def _cause(self, key: Key) -> str:
        others = [other for other in self._compiled if other.step == key.step]
        return min((_difference(key, other) for other in others), key=len, default="the first of its kind")


def _compiled(step: Callable[..., Tensor], first: bool) -> Program:
    """`step`, compiled. The `first` makes the tensors of the cache, and writes to few others."""
    if first or donates():
        return compile_step(_with_own_code(step))
    compiled = compile_step(_with_own_code(returning(step)))

    def run(state: State, *arguments: Tensor) -> Tensor:
        result: Tensor
        result, changed = compiled(state, *arguments)
        state.take(changed)
        return result

    return run


def _difference(key: Key, other: Key) -> str:
    names = [field.name for field in dataclasses.fields(key)]
    new = [name for name in names if getattr(key, name) != getattr(other, name)]
    return "; ".join(f"another {name.replace('_', ' ')} than {getattr(other, name)}" for name in new)


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with a code object of its own: torch finds what it has compiled by that, and here nothing else tells
    one shape from another."""
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace()
    return types.FunctionType(code, function.__globals__, None, function.__defaults__, function.__closure__)
