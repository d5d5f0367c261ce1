"""Compiling ahead, so that the first request does not wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import GenerationError
from .cache import bucket_length
from .loop import CHUNK, STEPS, generate
from .programs import Compilation, Programs
from .session import padded_pieces


def warm(
    model: Any, *, batches: Sequence[int], prompts: Sequence[int], lengths: Sequence[int], **options: Any
) -> tuple[Compilation, ...]:
    """Compiles what `tpu_kernels.generate` needs for requests of some sizes: prefill and decode for each.

    Args:
      model: on its device.
      batches: sequences.
      prompts: tokens of a prompt; all that round up to the same power of two share a graph.
      lengths: tokens of prompt and answer together; they round up likewise.
      options: as for `generate`: sampling, end tokens. What is compiled is for these, though not for their values.

    Returns: what was compiled and not there before.

    Raises:
      GenerationError: a length has no room for a prompt and an answer.

    Example:
      >>> for compiled in tpu_kernels.warm(model, batches=[1, 8], prompts=[128], lengths=[1024]):  # doctest: +SKIP
      ...     print(compiled)
    """
    programs = Programs.of(model)
    before = len(programs.compilations)
    steps, chunk = options.get("steps", STEPS), options.get("chunk", CHUNK)
    for length in map(bucket_length, lengths):
        for prompt in prompts:
            room = length - sum(padded_pieces(prompt, chunk)) - steps
            if room < 1:
                raise GenerationError(
                    f"a cache of {length} positions has no room for a prompt of {prompt} tokens, padded to a power of "
                    f"two, and {steps} new ones; give a length of at least {2 * length}"
                )
            for batch in batches:
                ids = torch.ones(batch, prompt, dtype=torch.int64)
                arguments = {"max_new_tokens": room + 1, "stopping_criteria": _at_once(), **options}
                generate(model, ids, attention_mask=torch.ones_like(ids), **arguments)
    return tuple(programs.compilations[before:])


def _at_once() -> Any:
    """Stops after the first token. The first dispatch of decode steps is on its way by then."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    class AtOnce(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.ones(input_ids.shape[0], dtype=torch.bool)

    return StoppingCriteriaList([AtOnce()])
