"""The choice of the next token, inside the compiled step.

Axis letters: B sequences, V tokens of the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NAMES = ("temperature", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: transformers' settings, in its order of processors.

    Attributes:
      sample: draw; else the likeliest token.
      top_k: draw from so many of the likeliest tokens; 0 from all.
      temperature, top_p, min_p, repetition_penalty: as in `GenerationConfig`; None where not used.
      padding_counts: the repetition penalty is for the padding of prompts, too, as in older transformers.
    """

    sample: bool = False
    top_k: int = 0
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    padding_counts: bool = True

    @classmethod
    def of(cls, processors: Iterable[Any], sample: bool) -> Sampling | str:
        """What the logits processors that `generate` has made amount to, or the name of one that has no place here."""
        from transformers.generation import logits_process as stock

        found: dict[str, Any] = {}
        for processor in processors:
            kind = type(processor)
            if kind is stock.RepetitionPenaltyLogitsProcessor and not isinstance(
                ignored := processor.prompt_ignore_length, int
            ):
                found |= {"repetition_penalty": processor.penalty, "padding_counts": ignored is None}
            elif kind is stock.TemperatureLogitsWarper:
                found["temperature"] = processor.temperature
            elif kind is stock.TopKLogitsWarper:
                found["top_k"] = processor.top_k
            elif kind is stock.TopPLogitsWarper and processor.min_tokens_to_keep == 1:
                found["top_p"] = processor.top_p
            elif kind is stock.MinPLogitsWarper and processor.min_tokens_to_keep == 1:
                found["min_p"] = processor.min_p
            else:
                return kind.__name__
        return cls(sample=sample, **found)

    @property
    def form(self) -> Sampling:
        """What a step is compiled for: the settings without their values, which are a tensor.

        Example:
          >>> Sampling(sample=True, top_k=50, temperature=0.7).form.temperature
          1.0
        """
        used = {name: 1.0 for name in NAMES if getattr(self, name) is not None}
        return dataclasses.replace(self, padding_counts=True, **used)  # type: ignore[arg-type]

    def values(self, device: Any) -> Tensor:
        """The settings in the order of `NAMES`, float32."""
        numbers = [getattr(self, name) for name in NAMES]
        return torch.tensor([1.0 if number is None else float(number) for number in numbers], device=device)


def choose(logits: Tensor, uniform: Tensor, values: Tensor, seen: Tensor | None, form: Sampling) -> Tensor:
    """The next token of each sequence.

    A draw inverts the cumulative distribution of the likeliest tokens first, of which top-k, top-p and min-p each
    keep the front. Tokens as likely as the k-th are cut off where transformers keeps them.

    Args:
      logits: [B, V].
      uniform: [B] in [0, 1), one a sequence; not looked at unless `form.sample`.
      values: `Sampling.values`.
      seen: [B, V] bool, tokens that are in the sequence already; None without a repetition penalty.
      form: which settings are used; their values are those in `values`.

    Returns: [B] int64.
    """
    setting = dict(zip(NAMES, values.unbind(), strict=True))
    scores = logits.float()
    if seen is not None:
        penalty = setting["repetition_penalty"]
        scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    if not form.sample:
        return scores.argmax(-1)
    if form.temperature is not None:
        scores = scores / setting["temperature"]
    cuts = form.top_p is not None or form.min_p is not None
    tokens = None
    if form.top_k or cuts:
        count = min(form.top_k, scores.shape[-1]) or scores.shape[-1]
        scores, tokens = scores.topk(count, dim=-1) if form.top_k else scores.sort(-1, descending=True)
    probabilities = scores.softmax(-1)
    cumulative = probabilities.cumsum(-1)
    kept = torch.ones_like(probabilities, dtype=torch.bool)
    if form.top_p is not None:
        kept = cumulative - probabilities < setting["top_p"]
    if form.min_p is not None:
        kept = kept & (probabilities >= setting["min_p"] * probabilities[:, :1])
    if cuts:
        # The likeliest always stays.
        kept = kept | (torch.arange(kept.shape[-1], device=kept.device) == 0)
        probabilities = probabilities * kept
        cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1:]
    # Rounding may lift the draw to the total, past the last token that has a share in it.
    last = (probabilities > 0).long().mul(torch.arange(kept.shape[-1], device=kept.device)).amax(-1)
    place = (cumulative <= uniform[:, None] * total).sum(-1).minimum(last)
    return place if tokens is None else tokens.gather(-1, place[:, None])[:, 0]


def mark(seen: Tensor, tokens: Tensor) -> Tensor:
    """`seen` [B, V] with the newest `tokens` [B] in it."""
    vocabulary = torch.arange(seen.shape[-1], device=seen.device)
    return seen | (vocabulary == tokens[:, None])
