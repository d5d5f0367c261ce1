"""What passes between the process that exports a model and the one that projects it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

# The arm that computes experts as the published kernel does.
PUBLISHED = "published"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Arm(_Record):
    """One way to compute a model.

    Attributes:
        experts: The experts implementation; `none` for a model without experts.
        attention: The attention implementation.
    """

    experts: str
    attention: str


class CutCall(_Record):
    """A kernel call that was cut out of a program: its inputs are results of the program, its result an input.

    Attributes:
        op: The op's name, as in `fused_experts`.
        kernel: The kernel that the op is of, by repository and version; None for the published kernel's stand-in.
        arrays: Shape and dtype of each tensor argument.
        static: Its other arguments.
    """

    op: str
    kernel: tuple[str, int] | None
    arrays: dict[str, tuple[tuple[int, ...], str]]
    static: dict[str, Any]


class Collective(_Record):
    """What chips exchange after a module.

    Attributes:
        kind: What.
        module: After which.
        chips: How many take part.
        width: Columns of the result, a row for each token.
    """

    kind: Literal["all-reduce", "all-gather"]
    module: str
    chips: int
    width: int


class LayerKind(_Record):
    """Layers that run the same program.

    Attributes:
        name: E.g. `sliding_attention`.
        index: One of them.
        count: How many there are.
        window: How many keys a token sees at most; None where it sees all.
    """

    name: str
    index: int
    count: int
    window: int | None


class Part(_Record):
    """A program of an arm: a kind of layer, or the ends of the step.

    Attributes:
        kind: Of the layer; None for the ends.
        arm: Whose it is; None for the ends, which are the same in each.
        batch: Sequences.
        file: StableHLO, in the folder of the answer.
        cache_bytes: Of the keys and values that it reads.
        calls: The kernel calls that belong to it.
    """

    kind: str | None
    arm: Arm | None
    batch: int
    file: str
    cache_bytes: int
    calls: tuple[CutCall, ...]


class Experts(_Record):
    """The experts of a layer: of the whole model, and each token's."""

    count: int
    top_k: int


class Request(_Record):
    """What to export.

    Attributes:
        config: The model's config, as JSON has it.
        tp, ep: The parallel plan.
        arms, batches: Of each the programs are made.
        context: Keys of the static cache.
    """

    config: dict[str, Any]
    tp: int
    ep: int
    arms: tuple[Arm, ...]
    batches: tuple[int, ...]
    context: int


class Answer(_Record):
    """What was exported.

    Attributes:
        model: Its class.
        parameters: Of the whole model.
        layers: Its kinds of layers.
        weights: Bytes of a chip's weights in each kind of layer, those of experts apart; under an empty name, at the
            ends.
        collectives: By kind of layer; under an empty name, those at the ends.
        experts: None for a model without.
        refused: Arms that do not serve the model, and why.
        parts: The programs.
        error: Why nothing was exported.
    """

    model: str = ""
    parameters: int = 0
    layers: tuple[LayerKind, ...] = ()
    weights: dict[str, tuple[int, int]] = {}
    collectives: dict[str, tuple[Collective, ...]] = {}
    experts: Experts | None = None
    refused: tuple[tuple[Arm, str], ...] = ()
    parts: tuple[Part, ...] = ()
    error: str | None = None
