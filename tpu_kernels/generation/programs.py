"""A model's steps, each compiled once for each shape, and why.

Axis letters: B sequences, L new tokens, S positions of the cache, T steps, V tokens of the vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .compilation import compile_step
from .sampling import Sampling
from .steps import Forward, State, make_decode, make_prefill


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
        self._compiled: dict[Key, Callable[..., Any]] = {}
        self.compilations: list[Compilation] = []

    @classmethod
    def of(cls, model: Any) -> Programs:
        """Those of `model`, kept with it."""
        programs: Programs | None = vars(model).get("_tpu_kernels_programs")
        if programs is None or programs._forward.model is not model:  # a copied model has the original's
            programs = model._tpu_kernels_programs = cls(model)
        return programs

    def __deepcopy__(self, memo: Any) -> Programs:
        return self

    def prefill(self, state: State, ids: Tensor, uniforms: Tensor, form: Sampling) -> Tensor:
        """Puts `ids` [B, L] in the cache; makes the token that follows, [1, B], drawn by `uniforms` [1, B]."""
        step = "first prefill" if state.cache.batch is None else "further prefill"
        function = make_prefill(self._forward, form)
        token: Tensor = self._run(step, ids.shape[1], function, state, ids, uniforms, form=form)
        return token

    def decode(self, state: State, uniforms: Tensor, form: Sampling) -> Tensor:
        """Makes the next tokens, [T, B], one a row of `uniforms` [T, B]."""
        steps = uniforms.shape[0]
        scanned = steps > 1 and state.token.device.type == "tpu"
        function = make_decode(self._forward, form, scanned)
        tokens: Tensor = self._run("decode", steps, function, state, uniforms, form=form)
        return tokens

    def _run(
        self,
        step: str,
        tokens: int,
        function: Callable[..., Any],
        state: State,
        *inputs: Tensor,
        form: Sampling,
    ) -> Any:
        if state.token.device.type != "tpu":
            return function(state, *inputs)
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
        if program is not None:
            return program(state, *inputs)
        cause = self._cause(key)
        program = compile_step(_with_own_code(function))
        started = time.perf_counter()
        # transformers has other experts for decoding than for prefill.
        experts = model._optimize_model_for_decode() if step == "decode" else contextlib.nullcontext()
        with experts:
            result = program(state, *inputs)
        self.compilations.append(Compilation(key, cause, time.perf_counter() - started))
        self._compiled[key] = program
        return result

    def _cause(self, key: Key) -> str:
        others = [other for other in self._compiled if other.step == key.step]
        return min((_difference(key, other) for other in others), key=len, default="the first of its kind")


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
