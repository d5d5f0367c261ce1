"""A kernel's own examples: small calls of its ops, and what follows from them.

A kernel declares them in its `cases.py`: `examples()` gives for each call the op's name, the call's name (`part`), the
arguments (by name: a pair of shape and dtype, or nested lists of integers) and the other arguments (`static`).
`benchmarks()` gives large calls in the same form.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

Values = Literal["normal", "zeros", "large"]
_LARGE = 8.0
# The largest number of each quantised dtype, which is so many standard deviations from zero.
_QUANTISED, _DEVIATIONS = {"int8": 127, "int4": 7}, 3.0
# Bytes: their middle, where an exponent of MXFP4 means one, and a standard deviation that leaves out the last few of
# both ends: what is drawn stays within sqrt(12) of them.
_BYTES_MIDDLE, _BYTES_DEVIATION = 127, 36


@dataclasses.dataclass(frozen=True)
class Example:
    """A call of an op on arrays that its name determines.

    Attributes:
        name: The op's and the call's.
        op: The op.
        arguments: By name, a pair of shape and dtype or integers.
        static: Other arguments.
        values: What floats are drawn from.
    """

    name: str
    op: Any
    arguments: Mapping[str, Any]
    static: Mapping[str, Any]
    values: Values = "normal"

    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each array; given integers are of 32 bits."""
        import numpy as np

        return {
            name: (tuple(value[0]), value[1]) if isinstance(value, tuple) else (np.shape(value), "int32")
            for name, value in self.arguments.items()
        }

    def differentiable(self) -> list[str]:
        """The arrays that have gradients: quantised ones have none."""
        shapes = self.shapes()
        return [name for name in self.op.differentiable if name in shapes and "int" not in shapes[name][1]]

    def dtype(self) -> str:
        """The dtype of the results, by the op's declaration."""
        import torch

        meta = {name: tensor.to("meta") for name, tensor in self.tensors().items()}
        result = self.op(**meta, **self.static)
        first = result if isinstance(result, torch.Tensor) else result[0]
        return str(first.dtype).removeprefix("torch.")

    @functools.cached_property
    def numbers(self) -> dict[str, Any]:
        """What the arrays hold, in numpy: integers, and floats as float32, about standard normal or those of `values`.

        They follow from the names alone, on every machine: whoever has an example need not be given them.
        """
        import numpy as np

        numbers = {}
        for name, value in self.arguments.items():
            if isinstance(value, tuple):
                shape, dtype = value
                factor = {"normal": 1.0, "zeros": 0.0, "large": _LARGE}[self.values]
                drawn = _drawn(f"{self.name}/{name}", shape) * np.float32(factor)
                numbers[name] = _as_dtype(drawn, dtype)
            else:
                numbers[name] = np.asarray(value, np.int32)
        return numbers

    @functools.cached_property
    def arrays(self) -> dict[str, Any]:
        """The arrays, of JAX."""
        import jax.numpy as jnp

        shapes = self.shapes()
        return {name: jnp.asarray(numbers, shapes[name][1]) for name, numbers in self.numbers.items()}

    def tensors(self, device: str = "cpu") -> dict[str, Any]:
        """The same as tensors."""
        import torch

        shapes = self.shapes()
        return {
            name: torch.from_numpy(numbers.copy()).to(getattr(torch, shapes[name][1])).to(device)
            for name, numbers in self.numbers.items()
        }

    def accepted(self) -> bool:
        """Whether the op takes such a call: its own declaration says so, and on a CPU its check of values."""
        try:
            self.op(**self.tensors(), **self.static)
        except ValueError:  # an InputError, of the kernel's own copy of the ops
            return False
        return True

    @functools.cached_property
    def precision(self) -> str:
        """What the reference computes in when it is given float64: that, or float32 where it converts to it."""
        import jax

        try:
            with jax.enable_x64(True):
                program = str(jax.make_jaxpr(self.reference())(self.wide("float64")))
        except TypeError:  # float64 and its own float32 do not go together in it
            return "float32"
        return "float32" if "f32[" in program else "float64"

    def expected(self) -> list[Any]:
        """The reference's results, in numpy as float64: computed in that where the reference does."""
        return _leaves(self.widely(lambda arrays: self.reference()(arrays)))

    def widely(self, run: Callable[[dict[str, Any]], Any]) -> Any:
        """What `run` makes of the arrays with floats as wide as the reference computes."""
        import jax

        with jax.enable_x64(self.precision == "float64"):
            return run(self.wide(self.precision))

    def wide(self, dtype: str) -> dict[str, Any]:
        """The arrays, with floats of that dtype."""
        return {
            name: array if array.dtype.kind in "iub" else array.astype(dtype)
            for name, array in self.arrays.items()
        }

    def reference(self) -> Any:
        """The op's reference as a function of the arrays, compiled."""
        import jax

        return jax.jit(lambda arrays: self.op.reference(**arrays, **self.static))

    def kernel(self, generation: str, interpret: Any) -> Any:
        """The op's kernel as a function of the arrays."""
        return lambda arrays: self.op.jax_fn(**arrays, **self.static, tpu=generation, interpret=interpret)

    def interpreted(self, generation: str) -> list[Any]:
        """The kernel's results by Pallas' plain interpreter, in numpy as float64."""
        import jax

        from ..analysis.target import parse_target

        with parse_target(generation).mesh():
            return _leaves(jax.jit(self.kernel(generation, True))(self.arrays))


def _drawn(name: str, shape: Sequence[int]) -> Any:
    """Numbers of float32, about standard normal: sums of four uniform ones, by exact operations on a stable stream."""
    import numpy as np

    raw = np.random.PCG64(zlib.crc32(name.encode())).random_raw(math.prod(shape))
    sums = raw.reshape(-1, 1).view(np.uint16).sum(axis=1, dtype=np.int64)
    spread = math.sqrt(4 / 12) * 2**16
    return ((sums - 2 * (2**16 - 1)) / spread).astype(np.float32).reshape(shape)


def _as_dtype(drawn: Any, dtype: str) -> Any:
    """Integers spread over all of a dtype's range; floats as they are."""
    import numpy as np

    if dtype == "uint8":
        return np.clip(_BYTES_MIDDLE + drawn * np.float32(_BYTES_DEVIATION), 0, 255).astype(np.uint8)
    if dtype not in _QUANTISED:
        return drawn
    most = _QUANTISED[dtype]
    return np.clip(drawn * np.float32(most / _DEVIATIONS), -most - 1, most).astype(np.int8)


def _leaves(result: Any) -> list[Any]:
    import jax
    import numpy as np

    return [np.asarray(leaf).astype(np.float64) for leaf in jax.tree.leaves(result)]


def declared(module: ModuleType) -> list[Example]:
    """The examples of a loaded kernel; none where it declares none."""
    calls = getattr(getattr(module, "cases", None), "examples", None)
    return [
        Example(f"{call.op} {call.part}".rstrip(), getattr(module, call.op), call.arguments, call.static)
        for call in (calls() if calls is not None else ())
    ]


def edges(example: Example, dtypes: Sequence[str]) -> Iterator[Example]:
    """Calls at the edges of what an example's op takes.

    Each size of the example in turn becomes 0, 1, and one more; each declared dtype takes the place of the example's;
    floats become zeros, and large. A size is known by its value, so that different axes of an example should have
    different sizes. Whether the op takes such a call is for `Example.accepted`.
    """
    shapes = example.shapes()
    given = {size for name, (shape, _) in shapes.items() if name not in _shaped(example) for size in shape}
    sizes = {size for name, (shape, _) in shapes.items() if name in _shaped(example) for size in shape}
    for size in sorted(sizes - given):
        for other in (0, 1, size + 1):
            if other != size:
                changed = {
                    name: (tuple(other if axis == size else axis for axis in shape), dtype)
                    for name, (shape, dtype) in shapes.items()
                    if name in _shaped(example)
                }
                yield _variant(example, f"{size} as {other}", changed)
    own = next((dtype for dtype in dtypes if any(dtype == used for _, used in shapes.values())), None)
    for dtype in dtypes:
        if own is not None and dtype != own:
            changed = {name: (shapes[name][0], dtype) for name in _shaped(example) if shapes[name][1] == own}
            yield _variant(example, dtype, changed)
    for values in ("zeros", "large"):
        yield dataclasses.replace(example, name=f"{example.name}, {values}", values=values)


def _shaped(example: Example) -> set[str]:
    return {name for name, value in example.arguments.items() if isinstance(value, tuple)}


def _variant(example: Example, name: str, changed: Mapping[str, Any]) -> Example:
    return dataclasses.replace(
        example, name=f"{example.name}, {name}", arguments={**example.arguments, **changed}
    )
