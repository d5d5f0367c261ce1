"""What a step computes: prefill of a piece of the prompt, and several decode steps in one.

Axis letters: B sequences, L new tokens, S positions of the cache, T steps, V tokens of the vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cache import StaticCache
from .sampling import Sampling, choose, mark


@dataclass
class State:
    """What goes from step to step, on the device.

    Attributes:
      cache: keys, values, states, and the position.
      token: [B] int64, the newest of each sequence, not in the cache yet.
      finished: [B] bool.
      seen: [B, V] bool, tokens of each sequence; None without a repetition penalty.
      valid: [B, S] bool, all but the padding on the left.
      padding: [B] int64, how much of that there is.
      ends: [n] int64, the token to pad with, then those that finish a sequence.
      settings: `Sampling.values`.
    """

    cache: StaticCache
    token: Tensor
    finished: Tensor
    seen: Tensor | None
    valid: Tensor
    padding: Tensor
    ends: Tensor
    settings: Tensor

    def is_end(self, tokens: Tensor) -> Tensor:
        """Which of `tokens` [B] finish their sequences."""
        same: Tensor = tokens[:, None] == self.ends[1:]
        return same.any(-1)

    def changing(self) -> list[Tensor]:
        """What a step writes to."""
        seen = [] if self.seen is None else [self.seen]
        return [self.token, self.finished, *seen, self.cache.cursor.length, *self.cache.tensors()]

    def over(self, changing: list[Tensor]) -> State:
        """This state with other tensors in the places of `changing`."""
        token, finished, *rest = changing
        seen = None if self.seen is None else rest.pop(0)
        length, *held = rest
        cache = self.cache.over(held, length)
        return State(cache, token, finished, seen, self.valid, self.padding, self.ends, self.settings)

    def take(self, changing: list[Tensor]) -> None:
        """Holds other tensors in the places of `changing`."""
        self.token, self.finished, *rest = changing
        if self.seen is not None:
            self.seen = rest.pop(0)
        self.cache.cursor.length, *held = rest
        self.cache.take(held)


class Forward:
    """A model's forward over a `StaticCache`."""

    def __init__(self, model: Any) -> None:
        from transformers.masking_utils import create_masks_for_generate

        parameters = inspect.signature(model.forward).parameters
        self.model = model
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.options: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if "logits_to_keep" in parameters:
            self.options["logits_to_keep"] = 1
        self.create_masks = getattr(model, "create_masks_for_generate", create_masks_for_generate)

    def __call__(self, ids: Tensor, state: State) -> Tensor:
        """The logits [B, V] after the last of `ids` [B, L], which then are in the state's cache."""
        places = torch.arange(ids.shape[1], device=ids.device) + state.cache.cursor.length
        positions = (places - state.padding[:, None]).clamp(min=0)
        outputs = self.model(
            input_ids=ids,
            attention_mask=self._masks(ids, state, places, positions),
            position_ids=positions,
            **{self.cache_name: state.cache},
            **self.options,
        )
        logits: Tensor = outputs.logits[:, -1]
        return logits

    def _masks(self, ids: Tensor, state: State, places: Tensor, positions: Tensor) -> Any:
        batch, new = ids.shape
        masks = self.create_masks(
            config=self.model.config,
            inputs_embeds=torch.empty((batch, new, 0), dtype=self.model.dtype, device=ids.device),
            attention_mask=state.valid,
            position_ids=positions,
            **{self.cache_name: state.cache},
        )
        if not isinstance(masks, dict):
            return _seeing_itself(masks, places)
        return {
            # Linear attention wants to know which of the new tokens are padding, of which a decode step has none.
            kind: (state.valid.index_select(1, places) if new > 1 else None)
            if kind in ("linear_attention", "conv")
            else _seeing_itself(mask, places)
            for kind, mask in masks.items()
        }


def _seeing_itself(mask: Tensor | None, places: Tensor) -> Tensor | None:
    """`mask` [B, 1, L, S] with each token seeing itself: padding that sees nothing becomes NaN, and then all does."""
    if mask is None or places.shape[0] == 1:
        return mask
    itself = torch.arange(mask.shape[-1], device=mask.device) == places[:, None]
    return mask | itself if mask.dtype == torch.bool else mask.masked_fill(itself, 0)


def make_prefill(forward: Forward, form: Sampling) -> Callable[..., Tensor]:
    """A function of the state, a piece [B, L] of prompts and uniforms [1, B]; returns the tokens after it, [1, B]."""

    def prefill(state: State, ids: Tensor, uniforms: Tensor) -> Tensor:
        logits = forward(ids, state)
        token = choose(logits, uniforms[0], state.settings, state.seen, form)
        state.token.copy_(token)
        state.finished.copy_(state.is_end(token))
        return token[None].clone()  # the next step takes the buffer of `state.token`

    return prefill


def make_decode(forward: Forward, form: Sampling, scanned: bool) -> Callable[..., Tensor]:
    """A function of the state and uniforms [T, B]; returns tokens [T, B].

    `scanned`, its T steps are one loop on the device.
    """

    def step(state: State, uniform: Tensor) -> Tensor:
        if state.seen is not None:
            state.seen.copy_(mark(state.seen, state.token))
        token = choose(forward(state.token[:, None], state), uniform, state.settings, state.seen, form)
        token = torch.where(state.finished, state.ends[0], token)
        state.finished.logical_or_(state.is_end(token))
        state.token.copy_(token)
        return token

    def decode(state: State, uniforms: Tensor) -> Tensor:
        return torch.stack([step(state, uniform) for uniform in uniforms])

    def decode_scanned(state: State, uniforms: Tensor) -> Tensor:
        def body(carry: list[Tensor], uniform: Tensor) -> tuple[list[Tensor], Tensor]:
            # A step writes in place, which a carry forbids; XLA sees through the clones.
            here = state.over([tensor.clone() for tensor in carry])
            token = step(here, uniform)
            return here.changing(), token.clone()

        from torch._higher_order_ops.scan import scan

        before = state.changing()
        after: list[Tensor]
        tokens: Tensor
        after, tokens = scan(body, before, uniforms)
        for old, new in zip(before, after, strict=True):
            old.copy_(new)
        return tokens

    return decode_scanned if scanned else decode


def returning(step: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, list[Tensor]]]:
    """`step` as one that writes to nothing: beside its result it returns what it has made of the state, for
    `State.take`. Where buffers are not donated, that spares the host a copy of each."""

    def pure(state: State, *arguments: Tensor) -> tuple[Tensor, list[Tensor]]:
        here = state.over([tensor.clone() for tensor in state.changing()])
        return step(here, *arguments), here.changing()

    return pure
