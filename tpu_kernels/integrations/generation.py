"""transformers' `generate`: this library's decode loop in its place, on the models that were switched."""

from __future__ import annotations

import functools
import weakref
from typing import Any

_switched: weakref.WeakSet[Any] = weakref.WeakSet()


def switch(model: Any) -> None:
    """Makes ``model.generate`` this library's, the way transformers itself lets a checkpoint bring its own."""
    from ..generation.loop import generate

    model.generate = functools.partial(generate, model)
    _switched.add(model)


def restore(model: Any = None) -> None:
    """Gives `model`, or every switched one, transformers' `generate` back."""
    for switched in [model] if model is not None else list(_switched):
        if switched in _switched:
            _switched.discard(switched)
            vars(switched).pop("generate", None)
