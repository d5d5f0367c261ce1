"""The parts of a model's decode step, as modules that can be exported: each kind of layer once, and what is around."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import ProjectionError
from .records import LayerKind

_FULL = "full_attention"
_KNOWN = (_FULL, "sliding_attention")


def layer_kinds(model: Any) -> list[LayerKind]:
    """The kinds of layers of a causal language model.

    Raises:
        ProjectionError: It has layers that keep no keys and values.
    """
    config = model.config.get_text_config(decoder=True)
    layers = model.base_model.layers
    types = getattr(config, "layer_types", None) or [
        "sliding_attention" if getattr(config, "sliding_window", None) else _FULL
    ] * len(layers)
    found: dict[Any, LayerKind] = {}
    for index, (layer, type_) in enumerate(zip(layers, types, strict=True)):
        if type_ not in _KNOWN:
            raise ProjectionError(
                f"layer {index} of {type(model).__name__} is {type_!r}; only {' and '.join(_KNOWN)} "
                "layers are projected"
            )
        shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
        kind = found.get((type_, shapes))
        if kind is not None:
            found[type_, shapes] = kind.model_copy(update={"count": kind.count + 1})
            continue
        same = sum(other.name.partition(" ")[0] == type_ for other in found.values())
        window = config.sliding_window if type_ == "sliding_attention" else None
        found[type_, shapes] = LayerKind(
            name=type_ + (f" {same + 1}" if same else ""), index=index, count=1, window=window
        )
    return list(found.values())


class Layer(nn.Module):
    """One layer, one new token of each sequence, over a static cache of `context` keys.

    Call: hidden states [B, 1, H], cosines and sines of the positions, mask [B, 1, 1, S], position [1], keys and values
    [B, heads, S, D]. Returns the hidden states, keys and values.
    """

    def __init__(self, model: Any, kind: LayerKind, *, batch: int, context: int) -> None:
        super().__init__()
        base = model.base_model
        keys = min(context, kind.window or context)
        width = model.config.get_text_config(decoder=True).hidden_size
        dtype = base.dtype
        self._rotary = _Given(base.rotary_emb)
        self.layer = base.layers[kind.index]
        self._call = _isolate(base, kind, self._rotary)
        boolean = base.config._attn_implementation != "eager"
        hidden = torch.empty(batch, 1, width, dtype=dtype, device="meta")
        mask = torch.empty(batch, 1, 1, keys, dtype=torch.bool if boolean else dtype, device="meta")
        position = torch.empty(1, dtype=torch.int64, device="meta")
        seen = _Cache(None, None, position)
        angles: list[Any] = []
        hook = self.layer.register_forward_pre_hook(
            lambda module, args, kwargs: angles.extend(kwargs["position_embeddings"]), with_kwargs=True
        )
        with torch.no_grad(), hook:
            self._call(hidden, mask[..., :1], position, seen)
        key, value = (
            x.new_empty(batch, x.shape[1], keys, x.shape[3]) for x in (seen.new_key, seen.new_value)
        )
        self.example = (hidden, *angles, mask, position, key, value)
        self.donated = (key, value)

    def forward(
        self, hidden: Any, cosines: Any, sines: Any, mask: Any, position: Any, key: Any, value: Any
    ) -> Any:
        self._rotary.given = (cosines, sines)
        cache = _Cache(key, value, position)
        out = self._call(hidden, mask, position, cache)
        return out, cache.key, cache.value


class Ends(nn.Module):
    """What a step does once: embeds tokens [B, 1]; norm, head and the most likely token of hidden states [B, 1, H]."""

    def __init__(self, model: Any, *, batch: int) -> None:
        super().__init__()
        self.embed_tokens, self.norm = model.base_model.embed_tokens, model.base_model.norm
        self.lm_head = model.get_output_embeddings()
        width = model.config.get_text_config(decoder=True).hidden_size
        tokens = torch.empty(batch, 1, dtype=torch.int64, device="meta")
        self.example = (tokens, torch.empty(batch, 1, width, dtype=model.dtype, device="meta"))
        self.donated = ()

    def forward(self, tokens: Any, hidden: Any) -> Any:
        return self.embed_tokens(tokens), self.lm_head(self.norm(hidden)).argmax(-1)


class _Given(nn.Module):
    """A rotary embedding whose results are given: they are made once a step, for all layers."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.inner: Any = (rotary,)  # not registered: its buffers are no inputs of the layer
        self.given: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner[0](*args, **kwargs) if self.given is None else self.given


class _Cache:
    """Keys and values of one layer, written as a function: the new ones at `position`."""

    is_compileable = True

    def __init__(self, key: Any, value: Any, position: Any) -> None:
        self.key, self.value, self.position = key, value, position
        self.new_key: Any = None
        self.new_value: Any = None

    def update(self, key: Any, value: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.new_key, self.new_value = key, value
        if self.key is None:
            return key, value
        self.key = torch.index_copy(self.key, 2, self.position, key)
        self.value = torch.index_copy(self.value, 2, self.position, value)
        return self.key, self.value

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return 0


def _isolate(base: Any, kind: LayerKind, rotary: nn.Module) -> Any:
    """A call of the model `base` that runs one layer alone, on hidden states, with a mask that is ready.

    The model's own forward calls it, which knows what its layers take.
    """
    layer, config = base.layers[kind.index], base.config
    takes_cache = "cache" in inspect.signature(type(base).forward).parameters
    cache_name = "cache" if takes_cache else "past_key_values"
    whole: Mapping[str, Any] = {
        "layers": base.layers,
        "rotary_emb": base.rotary_emb,
        "norm": base.norm,
    }
    types = getattr(config, "layer_types", None)
    parts = {"layers": nn.ModuleList([layer]), "rotary_emb": rotary, "norm": nn.Identity()}

    def call(hidden: Any, mask: Any, position: Any, cache: Any) -> Any:
        base._modules.update(parts)
        settings = {"num_hidden_layers": 1} | ({"layer_types": [types[kind.index]]} if types else {})
        former = {name: config.__dict__.get(name) for name in settings}
        config.__dict__.update(settings)
        # A mapping where masks are by type of layer: what is given is then taken as it is.
        given = dict.fromkeys(set(types), mask) if types and len(set(types)) > 1 else mask
        try:
            return base(
                inputs_embeds=hidden,
                attention_mask=given,
                position_ids=position.view(1, 1).expand(hidden.shape[0], 1),
                use_cache=True,
                **{cache_name: cache},
            ).last_hidden_state
        finally:
            base._modules.update(whole)
            config.__dict__.update(former)

    return call
