"""Named workloads: a layer of a real model in a phase of its use, such as `qwen3-30b-a3b:decode:64`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from importlib import resources
from types import ModuleType
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

from ..errors import AnalysisError
from .compiler import Job
from .target import parse_target

Phase = Literal["decode", "prefill", "train"]
Sharding = Literal["tp", "ep"]

_NAME = re.compile(
    r"(?P<model>[^:]+):(?P<phase>[^:]+):(?P<tokens>\d+)(?::(?P<sharding>tp|ep)(?P<chips>\d+))?"
)
_SEED = 0


class AttentionLayer(BaseModel):
    """A kind of softmax attention layer that a model has; on one chip, the heads that are there.

    Attributes:
        name: Of the kind.
        heads, kv_heads: Query heads and kv heads.
        head_dim: Of keys and values.
        window: A token sees at most so many keys.
        sinks: Each query head has one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    sinks: bool

    def shared(self, chips: int) -> AttentionLayer:
        """One chip's part of it; with fewer kv heads than chips, several have the same one."""
        return self.model_copy(
            update={"heads": self.heads // chips, "kv_heads": max(1, self.kv_heads // chips)}
        )


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden: int
    layers: int
    experts: int
    top_k: int
    moe_intermediate: int
    transposed: bool
    activation: str | None
    attention: tuple[AttentionLayer, ...]


class _Models(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    models: dict[str, _Model]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A layer of a mixture-of-experts model, its experts and its attention, on one chip.

    Attributes:
        name: As it was asked for.
        model: The model's name.
        phase: `decode`: each token is of another sequence; `prefill`; `train`: with the gradient.
        tokens: Of all chips; with expert parallelism each chip sees them all.
        hidden: Hidden size.
        intermediate: Of an expert, the part that is on this chip.
        experts: Of the layer.
        local_experts: Whose weights are on this chip: the first ones.
        top_k: Experts of each token.
        transposed: Weights are stored with the contraction before the columns.
        activation: Of an expert; None where it is one that no op here has.
        attention: The kinds of softmax attention that the model's layers have; none where it is all of another kind.
    """

    name: str
    model: str
    phase: Phase
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    local_experts: int
    top_k: int
    transposed: bool
    activation: str | None
    attention: tuple[AttentionLayer, ...]

    @property
    def rows(self) -> int:
        """Pairs of a token and an expert."""
        return self.tokens * self.top_k

    @functools.cached_property
    def top_k_index(self) -> list[list[int]]:
        """The experts of each token: different ones, all equally likely, drawn from a fixed seed."""
        import numpy as np

        draw = np.random.default_rng(_SEED).random((self.tokens, self.experts))
        index: list[list[int]] = np.argpartition(draw, self.top_k - 1, axis=1)[:, : self.top_k].tolist()
        return index

    @property
    def group_sizes(self) -> list[int]:
        """How many pairs each expert has."""
        sizes = [0] * self.experts
        for experts in self.top_k_index:
            for expert in experts:
                sizes[expert] += 1
        return sizes


@functools.cache
def _load() -> _Models:
    text = resources.files(__package__).joinpath("models.json").read_text(encoding="utf-8")
    return _Models.model_validate_json(text)


def models() -> tuple[str, ...]:
    """The names of the models that workloads are made from."""
    return tuple(_load().models)


def parse_workload(name: str) -> Workload:
    """Reads `<model>:<phase>:<tokens>`, with `:tp8` or `:ep8` behind it for one of as many chips.

    Raises:
        AnalysisError: There is no such model or phase, or the layer cannot be split over so many chips.

    Example:
        >>> workload = parse_workload("qwen3-30b-a3b:decode:64")
        >>> workload.rows, workload.experts
        (512, 128)
        >>> parse_workload("qwen3-30b-a3b:decode:64:tp8").intermediate
        96
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise AnalysisError(
            f"{name!r} is no case; give <model>:<phase>:<tokens>, such as qwen3-30b-a3b:decode:64, with :tp8 or :ep8 "
            f"behind it for one of 8 chips"
        )
    model = _load().models.get(match["model"])
    if model is None:
        raise AnalysisError(f"no model {match['model']!r} in case {name!r}; there are {', '.join(models())}")
    phase = next((phase for phase in get_args(Phase) if phase == match["phase"]), None)
    if phase is None:
        raise AnalysisError(
            f"no phase {match['phase']!r} in case {name!r}; there are {', '.join(get_args(Phase))}"
        )
    tokens, chips = int(match["tokens"]), int(match["chips"] or 1)
    split = {"tp": model.moe_intermediate, "ep": model.experts}.get(match["sharding"] or "", chips)
    if tokens < 1 or chips < 1 or split % chips:
        what = "its experts' intermediate size" if match["sharding"] == "tp" else "its experts"
        reason = f"{what}, {split}, cannot be split evenly over {chips}" if tokens else "it has no tokens"
        raise AnalysisError(f"case {name!r} is not possible: {reason}")
    spread = chips if match["sharding"] == "tp" else 1
    if any(layer.heads % spread for layer in model.attention):
        heads = model.attention[0].heads
        raise AnalysisError(
            f"case {name!r} is not possible: its {heads} heads cannot be split evenly over {chips}"
        )
    return Workload(
        name=name,
        model=match["model"],
        phase=phase,
        tokens=tokens,
        hidden=model.hidden,
        intermediate=model.moe_intermediate // spread,
        experts=model.experts,
        local_experts=model.experts // (chips if match["sharding"] == "ep" else 1),
        top_k=model.top_k,
        transposed=model.transposed,
        activation=model.activation,
        attention=tuple(layer.shared(spread) for layer in model.attention),
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of one of a kernel's ops, as a workload has it.

    Attributes:
        name: The workload's, and the part of it that this is, e.g. `qwen3-30b-a3b:decode:64 gate-up`.
        op: The op's name.
        job: What is compiled or simulated.
    """

    name: str
    op: str
    job: Job


def declares_calls(kernel: ModuleType) -> bool:
    """Whether a kernel says what a model's layer consists of: `calls(workload)` in its `cases.py`."""
    return hasattr(getattr(kernel, "cases", None), "calls")


def every_case(kernel: ModuleType, workload: Workload, *, tpu: str) -> list[Case]:
    """`kernel_cases` of each of the kernel's ops that has any; none where it declares no calls."""
    if not declares_calls(kernel):
        return []
    ops = dict.fromkeys(call.op for call in kernel.cases.calls(workload))
    return [case for op in ops for case in kernel_cases(kernel, workload, tpu=tpu, op=op)]


def kernel_cases(kernel: ModuleType, workload: Workload, *, tpu: str, op: str | None = None) -> list[Case]:
    """The calls of a kernel's ops that a workload consists of.

    A kernel declares them in its `cases.py`: `calls(workload)` gives for each the op's name, the part's name, the
    arguments (by name: a pair of shape and dtype, or nested lists of integers) and the other arguments.

    Args:
        kernel: A loaded kernel.
        workload: The layer.
        tpu: What the jobs are for.
        op: The op; unless given, that of the first call.

    Raises:
        AnalysisError: The kernel declares no calls, or none of that op for this workload.
    """
    if not declares_calls(kernel):
        raise AnalysisError(
            f"{kernel.__name__} declares no cases: its cases.py has no function calls(workload)"
        )
    calls = kernel.cases.calls(workload)
    chosen = op or (calls[0].op if calls else None)
    those = [call for call in calls if call.op == chosen]
    if not those:
        ops = ", ".join(sorted({call.op for call in calls})) or "none"
        raise AnalysisError(
            f"the kernel's op {chosen!r} has no call in {workload.name}; ops that have: {ops}"
        )
    return [
        Case(
            f"{workload.name} {call.part}".rstrip(),
            call.op,
            _job(getattr(kernel, call.op), call, tpu, training=workload.phase == "train"),
        )
        for call in those
    ]


def benchmark_cases(kernel: ModuleType, *, tpu: str) -> list[Case]:
    """The calls that a kernel names itself, in its `cases.py`: `benchmarks()`, in the form of `calls`.

    Args:
        kernel: A loaded kernel.
        tpu: What the jobs are for.
    """
    declared = getattr(getattr(kernel, "cases", None), "benchmarks", None)
    calls = declared() if declared is not None else []
    return [Case(call.part, call.op, _job(getattr(kernel, call.op), call, tpu)) for call in calls]


def find_cases(kernel: ModuleType, name: str, *, tpu: str, op: str | None = None) -> list[Case]:
    """The calls that a name stands for: one of the kernel's own benchmarks, else a workload.

    Args:
        kernel: A loaded kernel.
        name: A benchmark's, or as `parse_workload` reads it.
        tpu, op: As in `kernel_cases`.

    Raises:
        AnalysisError: There is no such case.
    """
    own = benchmark_cases(kernel, tpu=tpu)
    if found := [case for case in own if case.name == name and op in (None, case.op)]:
        return found
    try:
        return kernel_cases(kernel, parse_workload(name), tpu=tpu, op=op)
    except AnalysisError as error:
        if own:
            raise AnalysisError(
                f"{error}; the kernel's own cases are {', '.join(c.name for c in own)}"
            ) from None
        raise


def _job(op: Any, call: Any, tpu: str, *, training: bool = False) -> Job:
    import jax
    import numpy as np

    arrays, data = {}, {}
    for name, value in call.arguments.items():
        if isinstance(value, tuple):
            arrays[name] = jax.ShapeDtypeStruct(*value)
        else:
            data[name] = np.asarray(value, np.int32)
            arrays[name] = jax.ShapeDtypeStruct(data[name].shape, data[name].dtype)
    if not training:
        return Job(op, (), tpu, {**arrays, **call.static}, data)
    function, arguments = _with_gradient(op, arrays, call.static, parse_target(tpu).generation)
    return Job(function, arguments, tpu, data=data)


def _with_gradient(
    op: Any, arrays: dict[str, Any], static: dict[str, Any], generation: str
) -> tuple[Any, tuple[Any, ...]]:
    """The op and its gradient in all that can have one, as a function of its arrays and of its result's gradient."""
    import jax
    import jax.numpy as jnp

    def forward(**named: Any) -> Any:
        return op.jax_fn(**named, **static, tpu=generation, interpret=False)

    def training(*given: Any) -> Any:
        *values, gradient = given
        named = dict(zip(arrays, values, strict=True))
        floats = {name: x for name, x in named.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        result, pull_back = jax.vjp(lambda floats: forward(**{**named, **floats}), floats)
        [gradients] = pull_back(gradient)
        return result, gradients

    names = [*arrays, "gradient"]
    training.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    )
    training.__name__ = f"{op.__name__}_training"
    with parse_target(generation).mesh():
        result = jax.eval_shape(lambda named: forward(**named), arrays)
    return training, (*arrays.values(), result)
