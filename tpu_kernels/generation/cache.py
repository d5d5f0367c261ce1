"""A static key/value cache whose every layer type compiles once.

transformers' own keeps the position in a sliding window as a Python integer, so each step is a new graph. Here every
attention layer is as long as the cache and a window is a matter of the mask: nothing moves when it slides. All layers
share one position, a tensor: each tensor that a step changes costs host time.

Axis letters: B sequences, H key/value heads, L new tokens, S positions of the cache, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import (
    STATIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionLayer,
    StaticLayer,
    get_layer_types_and_kwargs,
)

from ..errors import GenerationError

SHORTEST = 64
# Layers that hold nothing have a type of their own from transformers 5.23 on.
_EMPTY = tuple(kind for name, kind in STATIC_LAYER_TYPE_MAPPING.items() if name == "dummy")


def bucket_length(positions: int) -> int:
    """The length of a cache for `positions`: powers of two, so that few lengths, hence few graphs, serve all prompts.

    Example:
      >>> bucket_length(70), bucket_length(128), bucket_length(1)
      (128, 128, 64)
    """
    return max(SHORTEST, 1 << (positions - 1).bit_length())


class Cursor:
    """Where the next token goes, shared by all layers of a cache.

    Attributes:
      length: [1] int64, on the cache's device.
    """

    def __init__(self, length: Tensor) -> None:
        self.length = length


class AttentionLayer(StaticLayer):  # type: ignore[misc]
    """Keys and values of one attention layer, written at the cursor.

    Attributes:
      keys: [B, H, S, D]; None before the first tokens. So are the values.
      is_sliding: tells transformers which mask is this layer's.
      moves_cursor: this is the last layer of a forward.
    """

    def __init__(self, max_cache_len: int, cursor: Cursor, is_sliding: bool = False) -> None:
        CacheLayerMixin.__init__(self)
        self.max_cache_len = max_cache_len
        self.cursor = cursor
        self.is_sliding = is_sliding
        self.moves_cursor = False

    def lazy_initialization(self, keys: Tensor, values: Tensor) -> None:
        """Allocates what is for tokens like `keys` and `values`."""
        self.keys = keys.new_zeros(*keys.shape[:2], self.max_cache_len, keys.shape[3])
        self.values = values.new_zeros(*values.shape[:2], self.max_cache_len, values.shape[3])
        self.device = keys.device
        self.cursor.length = self.cursor.length.to(keys.device)
        self.is_initialized = True

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes `keys` and `values` [B, H, L, D] at the cursor; returns all of the cache, [B, H, S, D]."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        new = keys.shape[2]
        places = torch.arange(new, device=keys.device) + self.cursor.length
        self.keys.index_copy_(2, places, keys)
        self.values.index_copy_(2, places, values)
        if self.moves_cursor:
            self.cursor.length.add_(new)
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        """The cursor [1]; the integer 0 while there is nothing, which spares transformers a look at the device."""
        return self.cursor.length if self.is_initialized else 0

    def reset(self) -> None:
        """Leaves everything where it is: what is past the cursor no token sees."""


class HybridLayer(AttentionLayer, LinearAttentionAndStaticFullAttentionLayer):  # type: ignore[misc]
    """A layer with both attention over the cache and the states of linear attention."""

    def __init__(
        self, max_cache_len: int, cursor: Cursor, is_sliding: bool = False, number_of_states: int = 1
    ) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        AttentionLayer.__init__(self, max_cache_len, cursor, is_sliding)

    def lazy_initialization(self, *keys_and_values: Tensor, **states: Any) -> None:
        """Allocates what is for keys and values, or, given by name, for states."""
        if states:
            LinearAttentionLayer.lazy_initialization(self, **states)
        else:
            AttentionLayer.lazy_initialization(self, *keys_and_values)

    def reset(self) -> None:
        """Zeroes the states."""
        LinearAttentionLayer.reset(self)


class StaticCache(transformers.StaticCache):  # type: ignore[misc]
    """A cache for `generate`, stock or ours, that compiles to one graph whatever the model's layers are.

    Full, sliding and chunked attention, linear attention and layers with both are held; of other types
    transformers' own layer is taken. A sliding layer takes as much memory as a full one.

    Args:
      config: the model's.
      max_cache_len: positions of prompt and new tokens together, rounded up by `bucket_length`.

    Attributes:
      max_cache_len: S.
      cursor: the position of the next token.

    Example:
      >>> cache = tpu_kernels.StaticCache(model.config, max_cache_len=200)  # doctest: +SKIP
      >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=64)  # doctest: +SKIP
      >>> cache.reset()  # doctest: +SKIP
    """

    def __init__(self, config: Any, max_cache_len: int) -> None:
        if max_cache_len < 1:
            raise GenerationError(f"a cache of {max_cache_len} positions holds nothing; give at least 1")
        self.max_cache_len = bucket_length(max_cache_len)
        self.cursor = Cursor(torch.zeros(1, dtype=torch.int64))
        kinds, arguments = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        layers = [self._layer(kind, kwargs) for kind, kwargs in zip(kinds, arguments, strict=True)]
        transformers.Cache.__init__(self, layers=layers)
        attention = [layer for layer in layers if isinstance(layer, AttentionLayer)]
        if attention:
            attention[-1].moves_cursor = True

    def _layer(self, kind: str, kwargs: dict[str, Any]) -> Any:
        if kind in ("full_attention", "sliding_attention", "chunked_attention"):
            return AttentionLayer(self.max_cache_len, self.cursor, kind != "full_attention")
        if kind in ("hybrid", "hybrid_sliding"):
            states = kwargs["number_of_states"]
            return HybridLayer(self.max_cache_len, self.cursor, kind == "hybrid_sliding", states)
        return STATIC_LAYER_TYPE_MAPPING[kind](max_cache_len=self.max_cache_len, **kwargs)

    @property
    def foreign_layers(self) -> tuple[str, ...]:
        """Types of the layers that are transformers' own, with a state that only stock `generate` handles."""
        ours = (AttentionLayer, LinearAttentionLayer, *_EMPTY)
        return tuple(sorted({type(layer).__name__ for layer in self.layers if not isinstance(layer, ours)}))

    @property
    def batch(self) -> int | None:
        """Sequences that it holds; None while it is empty."""
        return next((tensor.shape[0] for tensor in self.tensors()), None)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """All that it holds but the position."""
        held: list[Tensor | None] = []
        for layer in self.layers:
            if isinstance(layer, AttentionLayer):
                held += [layer.keys, layer.values]
            if isinstance(layer, LinearAttentionLayer):
                held += [*layer.conv_states.values(), *layer.recurrent_states.values()]
        return [tensor for tensor in held if tensor is not None]

    def take(self, tensors: list[Tensor]) -> None:
        """Holds `tensors` in the places of `tensors()`."""
        rest = iter(tensors)
        for layer in self.layers:
            if isinstance(layer, AttentionLayer) and layer.is_initialized:
                layer.keys, layer.values = next(rest), next(rest)
            if isinstance(layer, LinearAttentionLayer):
                for states in (layer.conv_states, layer.recurrent_states):
                    states.update({place: next(rest) for place, held in states.items() if held is not None})

    def over(self, tensors: list[Tensor], length: Tensor) -> StaticCache:
        """A cache like this one around other tensors, in the order of `tensors`, e.g. the carry of a loop."""
        return _Over(self, tensors, length)

    def reset(self) -> None:
        """Empties it. Its memory stays, and so do the graphs that were compiled for it."""
        super().reset()
        self.cursor.length.zero_()

    def release(self) -> None:
        """Empties it and gives its memory back; it then takes a batch of any size."""
        for layer in self.layers:
            if isinstance(layer, AttentionLayer):
                CacheLayerMixin.__init__(layer)
            if isinstance(layer, LinearAttentionLayer):
                LinearAttentionLayer.__init__(layer, number_of_states=layer.number_of_states)
        self.cursor.length = torch.zeros(1, dtype=torch.int64)

    @property
    def forgets(self) -> bool:
        """Whether its newest tokens can be taken out again, which the states of linear attention do not allow."""
        return not any(isinstance(layer, LinearAttentionLayer) for layer in self.layers)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes out the newest ``abs(tokens_to_remove)`` tokens."""
        if not self.forgets:
            raise GenerationError("linear attention cannot forget its newest tokens; reset the cache instead")
        self.cursor.length.sub_(abs(tokens_to_remove))

    def grow(self, max_cache_len: int) -> None:
        """Makes room for `max_cache_len` positions, rounded up by `bucket_length`. What it holds stays.

        Example:
          >>> cache.grow(2 * cache.max_cache_len)  # doctest: +SKIP
        """
        length = bucket_length(max_cache_len)
        if length <= self.max_cache_len:
            return
        if self.foreign_layers:
            raise GenerationError(f"{', '.join(self.foreign_layers)} cannot grow; make a new cache")
        for layer in self.layers:
            if isinstance(layer, AttentionLayer):
                if layer.is_initialized:
                    more = (0, 0, 0, length - self.max_cache_len)
                    layer.keys = torch.nn.functional.pad(layer.keys, more)
                    layer.values = torch.nn.functional.pad(layer.values, more)
                layer.max_cache_len = length
        self.max_cache_len = length


class _Over(StaticCache):
    def __init__(self, like: StaticCache, tensors: list[Tensor], length: Tensor) -> None:
        self.max_cache_len = like.max_cache_len
        self.cursor = Cursor(length)
        rest = iter(tensors)
        layers = [self._copy(layer, rest) for layer in like.layers]
        transformers.Cache.__init__(self, layers=layers)

    def _copy(self, layer: Any, tensors: Any) -> Any:
        new: Any
        if isinstance(layer, HybridLayer):
            new = HybridLayer(self.max_cache_len, self.cursor, layer.is_sliding, layer.number_of_states)
        elif isinstance(layer, AttentionLayer):
            new = AttentionLayer(self.max_cache_len, self.cursor, layer.is_sliding)
        elif isinstance(layer, LinearAttentionLayer):
            new = LinearAttentionLayer(number_of_states=layer.number_of_states)
        else:
            return layer
        if isinstance(layer, AttentionLayer):
            new.moves_cursor = layer.moves_cursor
            if layer.is_initialized:
                new.keys, new.values, new.is_initialized = next(tensors), next(tensors), True
        if isinstance(layer, LinearAttentionLayer):
            for own, others, known in (
                (new.conv_states, layer.conv_states, new.is_conv_states_initialized),
                (new.recurrent_states, layer.recurrent_states, new.is_recurrent_states_initialized),
            ):
                for index, state in others.items():
                    if state is not None:
                        own[index], known[index] = next(tensors), True
            for index in range(layer.number_of_states):
                new.conv_kernel_size[index] = layer.conv_kernel_size[index]
                new.has_previous_state[index] = layer.has_previous_state[index]
        return new
