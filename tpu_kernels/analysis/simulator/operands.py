"""What integers a function's kernels are given, found by evaluating all that leads to them on the CPU.

Arrays that are not given, and whatever is computed from them, stay unknown: with group sizes alone given, all that
is made of them is evaluated (numbers of tiles, lists of groups, grid sizes), and no matrix is touched.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import SimulationError
from ..export import Bound
from ..target import CompileTarget
from .copies import copied_values

_WORD, _LANES = 4, 128
_LARGEST_IN_SCALAR_MEMORY = 1 << 20  # elements of an operand that can control a kernel
_LARGEST = 1 << 24  # elements of an array that is worth evaluating
_CALLS = {
    "closed_call": "jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "checkpoint": "jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
}
_KERNELS = ("pallas_call", "mpmd_map")
# What says where an array should be, not what is in it.
_PLACEMENT = ("sharding_constraint", "with_memory_space_constraint")

Array = Any
Known = Array | None  # None: not known


@dataclass(frozen=True)
class KernelCall:
    """One call of a kernel.

    Attributes:
        site: Where in the function it is; a kernel in a loop is called several times from one site.
        shapes: Of its operands and results.
        data: The operands' values, as scalar memory has them, where they are known integers; by place.
        copied: What the kernel itself copies from vector to scalar memory, in order; None where that is not known.
    """

    site: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    data: Mapping[int, tuple[int, ...]]
    copied: tuple[tuple[int, ...] | None, ...] = ()


def find_kernel_calls(bound: Bound, data: Mapping[str, Any], target: CompileTarget) -> list[KernelCall]:
    """The kernel calls of a function, in its own order, with the integers they are given.

    Args:
        bound: The function, and the shapes of its arguments.
        data: Integer arrays by the name of the argument they are for.
        target: What it is traced for.

    Raises:
        SimulationError: There is no such argument, an array does not fit it, or a kernel is called in a loop or
            branch that depends on what is not known.
    """
    import jax

    known = _given(bound, data)
    with target.mesh():
        closed = jax.make_jaxpr(bound.function)(*bound.arguments)
    calls: list[KernelCall] = []
    _evaluate(closed.jaxpr, closed.consts, known, (), calls)
    return calls


def _given(bound: Bound, data: Mapping[str, Any]) -> list[Known]:
    """The values of the function's arguments, flattened."""
    import jax
    import numpy as np

    names = _names(bound)
    unknown = [name for name in data if name not in names]
    if unknown:
        raise SimulationError(
            f"data is given for {', '.join(map(repr, unknown))}, but the function's arrays are {', '.join(names)}"
        )
    known: list[Known] = []
    for name, argument in zip(names, bound.arguments, strict=True):
        leaves = jax.tree.leaves(argument)
        values: list[Any] = [None] * len(leaves)
        if name in data:
            # An argument that is one array may be given as nested lists.
            one = leaves == [argument]
            values = [data[name]] if one else jax.tree.leaves(data[name])
        if len(values) != len(leaves):
            raise SimulationError(f"data for {name!r} is {len(values)} arrays; it must be {len(leaves)}")
        for leaf, value in zip(leaves, values, strict=True):
            if value is None:
                # A number among the arguments is known; of an array, only the shape is.
                known.append(None if hasattr(leaf, "shape") else np.asarray(leaf))
                continue
            array = np.asarray(value)
            if array.dtype.kind not in "iub":
                raise SimulationError(f"data for {name!r} has dtype {array.dtype}; it must be of integers")
            if array.shape != tuple(leaf.shape):
                raise SimulationError(
                    f"data for {name!r} has shape {list(array.shape)}; the argument has {list(leaf.shape)}"
                )
            known.append(array.astype(leaf.dtype))
    return known


def _names(bound: Bound) -> list[str]:
    try:
        parameters = list(inspect.signature(bound.function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [positional[i] if i < len(positional) else f"arg{i}" for i in range(len(bound.arguments))]


def _evaluate(
    jaxpr: Any,
    consts: Sequence[Array],
    values: Sequence[Known],
    site: tuple[int, ...],
    calls: list[KernelCall],
) -> list[Known]:
    """Evaluates what is known, records the kernel calls; the results that are known."""
    from jax.extend.core import Literal

    env: dict[Any, Known] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, values, strict=True))

    def read(atom: Any) -> Known:
        return atom.val if isinstance(atom, Literal) else env.get(atom)

    for place, eqn in enumerate(jaxpr.eqns):
        operands = [read(atom) for atom in eqn.invars]
        results = _apply(eqn, operands, (*site, place), calls)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(
    eqn: Any, operands: list[Known], site: tuple[int, ...], calls: list[KernelCall]
) -> Sequence[Known]:
    name = eqn.primitive.name
    unknown: list[Known] = [None] * len(eqn.outvars)
    if name in _PLACEMENT:
        return operands
    if name in _KERNELS:
        calls.append(_call(eqn, operands, site))
        return unknown
    has_kernel = any(_has_kernel(inner) for inner in _jaxprs(eqn.params))
    if not has_kernel and all(value is not None for value in operands):
        return _computed(eqn, operands) if _is_small(eqn) else unknown
    if name in _CALLS and _CALLS[name] in eqn.params:
        inner = eqn.params[_CALLS[name]]
        return _evaluate(*_open(inner), operands, site, calls)
    if not has_kernel:
        return unknown
    if name == "scan":
        return _scan(eqn, operands, site, calls)
    if name == "cond":
        return _cond(eqn, operands, site, calls)
    if name == "while":
        return _while(eqn, operands, site, calls)
    raise SimulationError(f"the function calls a kernel within {name!r}, which the simulator cannot follow")


def _call(eqn: Any, operands: list[Known], site: tuple[int, ...]) -> KernelCall:
    known = {place: _words(value) for place, value in enumerate(operands)}
    data = {place: words for place, words in known.items() if words is not None}
    copied = copied_values(
        eqn, operands, lambda jaxpr, consts, values: _evaluate(jaxpr, consts, values, (), [])
    )
    atoms = [*eqn.invars, *eqn.outvars]
    shapes = tuple(tuple(atom.aval.shape) for atom in atoms)
    return KernelCall(site, shapes, data, tuple(map(_words, copied)))


def _words(value: Known) -> tuple[int, ...] | None:
    """An array as scalar memory has it; None for one that is not known, or of no integers."""
    import numpy as np

    array = None if value is None else np.asarray(value)
    if array is None or array.dtype.kind not in "iu" or array.size > _LARGEST_IN_SCALAR_MEMORY:
        return None
    words = _stored(array)
    return None if words is None else tuple(words.tolist())


def _stored(array: Array) -> Array | None:
    """The words of an array in the order that scalar memory has them; None for elements longer than a word.

    Arrays are in tiles of up to 8 rows of 128, vectors in rows of 128; a word holds narrower elements of
    consecutive rows.
    """
    import numpy as np

    packed = _WORD // array.dtype.itemsize
    if not packed:
        return None
    if array.ndim < 2:
        if packed == 1:
            return array.ravel()
        padded = np.pad(array.ravel(), (0, -array.size % (packed * _LANES)))
        tiles = padded.reshape(-1, packed, _LANES)
    else:
        *outer, rows, columns = array.shape
        height = max(packed, min(8, 1 << (rows - 1).bit_length()))
        padding = [(0, 0)] * len(outer) + [(0, -rows % height), (0, -columns % _LANES)]
        padded = np.pad(array, padding)
        down, across = padded.shape[-2] // height, padded.shape[-1] // _LANES
        tiles = np.swapaxes(padded.reshape(*outer, down, height, across, _LANES), -3, -2)
        tiles = tiles.reshape(-1, packed, _LANES)
    words = np.ascontiguousarray(np.swapaxes(tiles, 1, 2))
    return words.view(np.int32).ravel()


def _scan(eqn: Any, operands: list[Known], site: tuple[int, ...], calls: list[KernelCall]) -> Sequence[Known]:
    params = eqn.params
    fixed, carried = params["num_consts"], params["num_carry"]
    consts, carry, rows = (
        operands[:fixed],
        operands[fixed : fixed + carried],
        operands[fixed + carried :],
    )
    order = range(params["length"])
    for step in reversed(order) if params["reverse"] else order:
        row = [None if value is None else value[step] for value in rows]
        jaxpr, inner = _open(params["jaxpr"])
        carry = _evaluate(jaxpr, inner, [*consts, *carry, *row], site, calls)[:carried]
    # (What the steps put out one by one is not put together.)
    return [*carry, *[None] * (len(eqn.outvars) - carried)]


def _cond(eqn: Any, operands: list[Known], site: tuple[int, ...], calls: list[KernelCall]) -> Sequence[Known]:
    choice, *rest = operands
    if choice is None:
        raise SimulationError(
            "the function calls a kernel in a branch that depends on integers which are not given; give them with data="
        )
    branch = int(min(max(int(choice), 0), len(eqn.params["branches"]) - 1))
    return _evaluate(*_open(eqn.params["branches"][branch]), rest, (*site, branch), calls)


def _while(
    eqn: Any, operands: list[Known], site: tuple[int, ...], calls: list[KernelCall]
) -> Sequence[Known]:
    params = eqn.params
    first, second = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = operands[:first], operands[first : first + second]
    carry: Sequence[Known] = operands[first + second :]
    while True:
        [goes_on] = _evaluate(*_open(params["cond_jaxpr"]), [*cond_consts, *carry], site, calls)
        if goes_on is None:
            raise SimulationError(
                "the function calls a kernel in a loop whose end depends on integers that are not given; give them "
                "with data="
            )
        if not goes_on:
            return carry
        carry = _evaluate(*_open(params["body_jaxpr"]), [*body_consts, *carry], site, calls)


def _computed(eqn: Any, operands: list[Known]) -> Sequence[Known]:
    values = eqn.primitive.bind(*operands, **eqn.params)
    return values if eqn.primitive.multiple_results else [values]


def _is_small(eqn: Any) -> bool:
    return all(math.prod(getattr(out.aval, "shape", ())) <= _LARGEST for out in eqn.outvars)


def _open(jaxpr: Any) -> tuple[Any, Sequence[Array]]:
    """A jaxpr and its constants, which a closed one brings along."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())


def _jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(item, "eqns") or hasattr(item, "jaxpr"):
                yield _open(item)[0]


def _has_kernel(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name in _KERNELS or any(map(_has_kernel, _jaxprs(eqn.params))) for eqn in jaxpr.eqns
    )
