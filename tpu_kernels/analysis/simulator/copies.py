"""What a kernel copies from vector to scalar memory, such as counts that its vector unit makes of a table.

The kernel's program up to such a copy is made a pure function of its operands, and what of that is known is
evaluated on the CPU, like all else that leads to a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Results of a pure program from its constants and arguments; None stands for what is not known.
Evaluate = Callable[[Any, Sequence[Any], Sequence[Any]], Sequence[Any]]


def copied_values(eqn: Any, operands: Sequence[Any], evaluate: Evaluate) -> list[Any]:
    """The arrays that a kernel copies to scalar memory, in order; None for those that are not known.

    Whole buffers are found, copied by a kernel without a grid outside of its loops and branches. At the first copy
    of another kind the list ends.

    Args:
        eqn: The call of the kernel.
        operands: The call's, None where they are not known.
        evaluate: Evaluates programs.
    """
    if "grid_mapping" not in eqn.params or eqn.params["grid_mapping"].grid:
        return []
    values = []
    for place, inner in enumerate(eqn.params["jaxpr"].eqns):
        copies = list(_copies(inner))
        if not copies:
            continue
        source, target = copies[0]
        if inner.primitive.name != "dma_start" or _is_part(source) or _is_part(target):
            break
        values.append(_content(eqn, place, source, operands, evaluate))
    return values


def _copies(eqn: Any) -> Iterator[tuple[Any, Any]]:
    """Source and target of each copy from vector to scalar memory in an equation."""
    import jax

    if eqn.primitive.name == "dma_start":
        source, target, *_ = jax.tree.unflatten(eqn.params["tree"], eqn.invars)
        if _space(source) == "vmem" and _space(target) == "smem":
            yield source, target
    for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda value: hasattr(value, "eqns")):
        for each in getattr(inner, "eqns", ()):
            yield from _copies(each)


def _is_part(ref: Any) -> bool:
    return hasattr(ref, "transforms")


def _space(ref: Any) -> str:
    variable = ref.ref if _is_part(ref) else ref
    return str(getattr(variable.aval, "memory_space", None)).lower()


def _content(eqn: Any, place: int, ref: Any, operands: Sequence[Any], evaluate: Evaluate) -> Any:
    """What a buffer of a kernel holds before the kernel's equation at `place`."""
    import jax.numpy as jnp
    from jax._src.pallas.hlo_interpreter import kernel_to_hlo_jaxpr  # what Pallas interprets kernels by
    from jax.interpreters import partial_eval

    kernel = eqn.params["jaxpr"]
    before = kernel.replace(
        eqns=kernel.eqns[:place], outvars=[], debug_info=kernel.debug_info.with_unknown_names()
    )
    pure, constants, _ = kernel_to_hlo_jaxpr(before, (), eqn.params["grid_mapping"])
    needed, used = partial_eval.dce_jaxpr(pure, [variable is ref for variable in kernel.invars])
    # A kernel that is right does not look at what its buffers hold at first.
    memories: list[Any] = [variable.aval for variable in pure.invars]
    arguments = [
        operands[at] if at < len(operands) else jnp.zeros(memory.shape, memory.dtype)
        for at, memory in enumerate(memories)
        if used[at]
    ]
    [content] = evaluate(needed, constants, arguments)
    return content
