"""One request: the prompt goes in in pieces, dispatches of steps follow, the host reads their tokens one behind.

Axis letters: B sequences, P columns of the prompt, S positions of the cache, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import GenerationError
from .cache import StaticCache
from .programs import Programs
from .sampling import Sampling
from .steps import State

SHORTEST_PIECE = 16


def padded_pieces(length: int, chunk: int) -> list[int]:
    """Pieces for a prompt of `length` with padding before it: the first a power of two, the others whole chunks.

    Example:
      >>> padded_pieces(100, 512), padded_pieces(600, 512)
      ([128], [128, 512])
    """
    rest = (length - 1) % chunk + 1
    first = max(SHORTEST_PIECE, 1 << (rest - 1).bit_length())
    return [min(first, max(chunk, SHORTEST_PIECE)), *[chunk] * ((length - rest) // chunk)]


def exact_pieces(length: int, chunk: int) -> list[int]:
    """Pieces for `length` tokens without padding: whole chunks, then smaller powers of two.

    Example:
      >>> exact_pieces(1100, 512)
      [512, 512, 64, 8, 4]
    """
    whole, rest = divmod(length, chunk)
    return [chunk] * whole + [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]


class Session:
    """Tokens for one batch of prompts.

    Args:
      model: on its device.
      ids: [B, P] int64, on the CPU.
      mask: [B, P], 0 where a prompt is padded on the left; None if nowhere.
      config: the `GenerationConfig` that `generate` has prepared.
      sampling: how tokens are chosen.
      steps, chunk: see `generate`.
      cache: the caller's, to fill or to go on with; None for one of its own.
    """

    def __init__(
        self,
        model: Any,
        ids: Tensor,
        mask: Tensor | None,
        config: Any,
        sampling: Sampling,
        *,
        steps: int,
        chunk: int,
        cache: StaticCache | None,
    ) -> None:
        batch, columns = ids.shape
        held = 0 if cache is None else _check(cache, batch, columns, config.max_length)
        # A cache that outlives this has its tokens in the columns that they have in the sequences: no padding there.
        self._kept = cache is not None or bool(config.return_dict_in_generate)
        self._pieces = exact_pieces(columns - held, chunk) if self._kept else padded_pieces(columns, chunk)
        lead = sum(self._pieces) - (columns - held)
        new = config.max_length - columns
        self._steps, self._dispatches = steps, math.ceil((new - 1) / steps)
        length = lead + columns + self._dispatches * steps
        if cache is None:
            cache = StaticCache(model.config, length)
        cache.grow(length)
        self._programs = Programs.of(model)
        self._form = sampling.form
        self._pad = config._pad_token_tensor
        self._prompt = torch.nn.functional.pad(ids[:, held:], (lead, 0))
        self._sequences = torch.nn.functional.pad(ids, (0, new))
        self._columns = self._position = columns
        self.state = _state(model, cache, ids, mask, config, sampling, lead)
        self._first_draw, *self._draws = self._draw(batch, sampling.sample)

    def start(self) -> None:
        """Puts the prompt in the cache and makes the first token."""
        state = self.state
        state.cache.cursor.length = state.cache.cursor.length.to(state.token.device)
        for piece in self._prompt.split(self._pieces, dim=1):
            prefill = self._programs.prefill(state, piece.shape[1], self._form)
            self._first = prefill(state, piece.to(state.token.device), self._first_draw)

    def run(self, stopping_criteria: Any, streamer: Any) -> Tensor:
        """Makes the other tokens, until all sequences are done; returns those with their prompts."""
        padded = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        unfinished = torch.ones(self._sequences.shape[0], dtype=torch.bool)
        end = self._columns
        for tokens in self._tokens():
            if padded:
                tokens = torch.where(unfinished, tokens, self._pad)
            self._sequences[:, end] = tokens
            end += 1
            if streamer is not None:
                streamer.put(tokens)
            unfinished &= ~stopping_criteria(self._sequences[:, :end], None)
            if not unfinished.any():
                break
        if self._kept:
            self._rewind(end - 1)
        return self._sequences[:, :end]

    def _tokens(self) -> Iterator[Tensor]:
        """Each step's tokens, [B], on the CPU, while the device makes those of the next dispatch."""
        state = self.state
        queue = deque([self._first])
        decode = self._programs.decode(state, self._steps, self._form)
        for draw in self._draws:
            queue.append(decode(state, draw))
            self._position += self._steps
            yield from queue.popleft().cpu()
        yield from queue.popleft().cpu()

    def _draw(self, batch: int, sample: bool) -> list[Tensor]:
        """Uniform random numbers, [1, B] for prefill and [T, B] for each dispatch; where there is no choice, zeros."""
        sizes = [1, *[self._steps] * self._dispatches]
        device = self.state.token.device
        if not sample:
            zeros = {size: torch.zeros(size, batch, device=device) for size in set(sizes)}
            return [zeros[size] for size in sizes]
        # All at once, so that a seed gives the same tokens whatever the number of steps.
        return [draw.to(device) for draw in torch.rand(sum(sizes), batch).split(sizes)]

    def _rewind(self, position: int) -> None:
        """Takes out of the cache what was made for nothing."""
        cache = self.state.cache
        if self._position > position and not cache.forgets:
            cache.release()
        else:
            cache.cursor.length.fill_(position)


def _check(cache: StaticCache, batch: int, columns: int, most: int) -> int:
    """How many of `columns` tokens the cache holds; refuses one that does not go with them."""
    if cache.batch not in (None, batch):
        raise GenerationError(
            f"the cache holds a batch of {cache.batch}, but there are {batch} prompts; release() it, or make another"
        )
    held = 0 if cache.batch is None else int(cache.cursor.length)
    if held >= columns:
        raise GenerationError(
            f"the cache holds {held} tokens, but the prompt has only {columns}; give the whole sequence so far and "
            "what comes after it, or reset() the cache"
        )
    if most - 1 > cache.max_cache_len:
        raise GenerationError(
            f"a prompt of {columns} tokens and {most - columns} new ones take {most - 1} positions, but the cache has "
            f"{cache.max_cache_len}; grow({most - 1}) it, or ask for fewer new tokens"
        )
    return held


def _state(
    model: Any,
    cache: StaticCache,
    ids: Tensor,
    mask: Tensor | None,
    config: Any,
    sampling: Sampling,
    lead: int,
) -> State:
    batch, columns = ids.shape
    valid = torch.ones(batch, cache.max_cache_len, dtype=torch.bool)
    valid[:, :lead] = False
    if mask is not None:
        valid[:, lead : lead + columns] = mask.bool()
    pad, ends = config._pad_token_tensor, config._eos_token_tensor
    ends = [] if ends is None else ends.flatten().tolist()
    seen = None
    if sampling.repetition_penalty is not None:
        seen = torch.zeros(batch, model.config.get_text_config().vocab_size, dtype=torch.bool)
        for row, tokens, real in zip(seen, ids, valid[:, lead:], strict=True):
            row[tokens if sampling.padding_counts else tokens[real[:columns]]] = True
    device = model.device
    return State(
        cache=cache,
        token=torch.zeros(batch, dtype=torch.int64, device=device),
        finished=torch.zeros(batch, dtype=torch.bool, device=device),
        seen=None if seen is None else seen.to(device),
        valid=valid.to(device),
        padding=(~valid).sum(1).to(device),
        ends=torch.tensor([0 if pad is None else int(pad), *ends], device=device),
        settings=sampling.values(device),
    )
