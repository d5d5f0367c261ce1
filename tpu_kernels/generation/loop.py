"""`generate` with the loop on the device: a host that feeds steps, reads tokens and decides when to stop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from ..errors import DeviceError, GenerationError, first_line
from ..log import warn_once
from .cache import AttentionLayer, StaticCache
from .sampling import Sampling
from .session import Session

STEPS = 16
CHUNK = 512


def generate(
    model: Any, inputs: Tensor | None = None, *, steps: int = STEPS, chunk: int = CHUNK, **arguments: Any
) -> Any:
    """`model.generate` with the decode loop on the device.

    The same tokens as transformers' greedy decoding, and the same distribution where it samples. What this loop
    cannot do (beam search, scores, images, a logits processor of one's own) transformers' loop does, and the log
    says so once.

    Args:
      model: a transformers model for causal language modelling.
      inputs: prompts [B, length], padded on the left, with an ``attention_mask`` beside them.
      steps: tokens made in one dispatch: more cost less host time, and stopping is looked at, and a streamer told,
        that much less often. The result does not depend on it.
      chunk: longer prompts are put in the cache in pieces of so many tokens, a power of two.
      arguments: those of `model.generate`.

    Raises:
      GenerationError: the prompt does not fit the cache that was given, or that holds another batch.
      DeviceError: the device's memory does not suffice.

    Example:
      >>> inputs = tokenizer(["Hello"], return_tensors="pt")  # doctest: +SKIP
      >>> tpu_kernels.generate(model, **inputs, max_new_tokens=64)  # doctest: +SKIP
    """
    # transformers hands neither of the two on to a loop that is not its own.
    streamer = arguments.get("streamer")
    tokenizer = arguments.pop("tokenizer", None)
    config = arguments.get("generation_config") or model.generation_config
    strings = arguments.pop("stop_strings", None) or config.stop_strings
    if strings:
        from transformers import StoppingCriteriaList, StopStringCriteria

        if tokenizer is None:
            raise GenerationError("stop_strings need the tokenizer: give it too, as tokenizer=")
        criteria = list(arguments.pop("stopping_criteria", None) or [])
        criteria.append(StopStringCriteria(tokenizer, strings))
        arguments["stopping_criteria"] = StoppingCriteriaList(criteria)
        if config.stop_strings:
            arguments["stop_strings"] = []
    loop = functools.partial(decode, steps=steps, chunk=chunk, streamer=streamer)
    stock = type(model).generate
    return stock(model, inputs, custom_generate=loop, **arguments)


def decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    steps: int = STEPS,
    chunk: int = CHUNK,
    **model_kwargs: Any,
) -> Any:
    """The loop itself, as ``model.generate(..., custom_generate=tpu_kernels.decode)``.

    transformers passes no streamer and no tokenizer on to a loop that is not its own: use `generate` for those.
    """
    if steps < 1 or chunk < 1 or chunk & (chunk - 1):
        raise GenerationError(
            f"steps is {steps} and chunk {chunk}; they must be at least 1, chunk a power of two"
        )
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    sampling = Sampling.of(logits_processor, generation_config.do_sample)
    reason = _not_served(model, generation_config, sampling, cache, synced_gpus, model_kwargs)

    def stock(reason: str) -> Any:
        warn_once(f"generate runs transformers' own loop: {reason}")
        loop = getattr(type(model), _stock_loop(generation_config))
        return loop(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            **({"streamer": streamer} if streamer is not None else {}),
            **({"synced_gpus": synced_gpus} if synced_gpus else {}),
            **model_kwargs,
        )

    if reason is not None:
        return stock(reason)
    assert isinstance(sampling, Sampling)
    ours = cache if isinstance(cache, StaticCache) else None
    mask = model_kwargs.get("attention_mask")
    try:
        with _memory_errors(input_ids, generation_config, ours):
            session = Session(
                model,
                input_ids.cpu(),
                None if mask is None else mask.cpu(),
                generation_config,
                sampling,
                steps=steps,
                chunk=chunk,
                cache=ours,
            )
            try:
                session.start()
            except TorchDynamoException as error:
                if _is_of_memory(error):
                    raise
                if ours is not None:
                    ours.release()
                return stock(f"the model's step cannot be compiled as one graph ({first_line(error)})")
            sequences = session.run(stopping_criteria, streamer)
    except GenerationError:
        raise
    except BaseException:
        # What was cut off may have taken the cache's buffers with it.
        if ours is not None:
            ours.release()
        raise
    finally:
        if streamer is not None:
            streamer.end()
    sequences = sequences.to(input_ids.device)
    if not generation_config.return_dict_in_generate:
        return sequences
    from transformers.generation import GenerateDecoderOnlyOutput

    fields = {field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)}
    name = "cache" if "cache" in fields else "past_key_values"
    return GenerateDecoderOnlyOutput(sequences=sequences, **{name: session.state.cache})


_KNOWN = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep"}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def _not_served(
    model: Any,
    config: Any,
    sampling: Sampling | str,
    cache: Any,
    synced_gpus: bool,
    model_kwargs: dict[str, Any],
) -> str | None:
    """Why this loop cannot do what is asked for; None where it can."""
    mode = config.get_generation_mode().value
    if model.config.is_encoder_decoder:
        return "the model has an encoder"
    if mode not in ("greedy_search", "sample"):
        return f"it has no {mode.replace('_', ' ')}"
    if isinstance(sampling, str):
        return f"{sampling} is not among the logits processors of the compiled step"
    asked = [name for name in _OUTPUTS if config.return_dict_in_generate and getattr(config, name)]
    if asked:
        return f"{', '.join(asked)} would have to leave the device in every step"
    if synced_gpus:
        return "synced_gpus is for models in parts on several GPUs"
    if config.use_cache is False:
        return "use_cache is False"
    others = sorted(name for name, value in model_kwargs.items() if value is not None and name not in _KNOWN)
    if others:
        return f"{', '.join(others)} must be given to the model in a way of its own"
    if getattr(cache, "_is_user_defined", False) and not isinstance(cache, StaticCache):
        return f"the cache that was given is a {type(cache).__name__}, not a tpu_kernels.StaticCache"
    mask = model_kwargs.get("attention_mask")
    if mask is not None and (mask.ndim != 2 or bool((mask.diff(dim=1) < 0).any())):
        return "the attention mask is not one of padding on the left"
    try:
        probe = StaticCache(model.config, 1)
    except KeyError as error:
        return f"layers of type {error} have no static cache"
    if probe.foreign_layers:
        return f"{', '.join(probe.foreign_layers)} holds what the compiled step does not know of"
    if not any(isinstance(layer, AttentionLayer) for layer in probe.layers):
        return "no layer of the model attends to keys and values"
    return None


def _stock_loop(config: Any) -> Any:
    from transformers.generation.utils import GENERATION_MODES_MAPPING

    return GENERATION_MODES_MAPPING[config.get_generation_mode()]


@contextlib.contextmanager
def _memory_errors(ids: Tensor, config: Any, cache: StaticCache | None) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not _is_of_memory(error):
            raise
        batch, columns = ids.shape
        given = "" if cache is None else f" in a cache of {cache.max_cache_len} positions"
        raise DeviceError(
            f"the device's memory does not suffice for {batch} sequences of up to {config.max_length} tokens "
            f"({columns} of them prompt){given}; use a smaller batch, fewer new tokens, a shorter cache or a smaller "
            "chunk"
        ) from error


def _is_of_memory(error: RuntimeError) -> bool:
    said = str(error).lower()
    return any(sign in said for sign in ("resource_exhausted", "out of memory", "can't allocate memory"))
