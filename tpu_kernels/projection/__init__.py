"""A model's decode step on a TPU, projected from its config alone: no TPU, no weights.

`projection.project` exports each kind of layer from the meta device (`worker`, `layers`, `sharding`, `export`),
compiles it with the real compiler, follows every op's schedule (`times`) and puts the step together (`step`), with
what chips exchange and the host does as stated terms (`terms`)::

    from tpu_kernels.projection import project
    print(project("Qwen/Qwen3-30B-A3B", tpu="v6e-8", parallel="ep8"))

Importing this package loads neither torch nor jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .projection import project as project
    from .result import Projection as Projection

__all__ = ["Projection", "project"]


def __getattr__(name: str) -> Any:
    if name == "project":
        from .projection import project

        return project
    if name == "Projection":
        from .result import Projection

        return Projection
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
