"""Golden vectors: a kernel's examples and what they come to, in float64, for a device to be tried on.

They travel in the build as `golden.safetensors`, which is verified before it is read: the results of each example, as
float32, under `<example>/<place>`, and in the header its call, its tolerance and a digest of its arrays. The arrays
themselves follow from the example's name.
"""

from __future__ import annotations

import hashlib
import json
import pkgutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import BuildError, DeviceError
from ..files import replace_file
from ..hub import get_local_kernel
from .builder import build
from .comparison import Difference, compare, tolerance_of
from .examples import Example, declared
from .project import read_project

GOLDEN_FILE = "golden.safetensors"
_HEADER = "examples"


@dataclass(frozen=True)
class Vector:
    """One golden vector beside what a device makes of it.

    Attributes:
        name: The example's.
        difference: How far the device's results are off; None where it raised.
        failure: What it raised.
    """

    name: str
    difference: Difference | None
    failure: str = ""

    @property
    def passed(self) -> bool:
        """Whether the results are right."""
        return self.difference is not None and not self.difference.wrong


def write_golden(source: str | Path) -> Path:
    """Makes the golden vectors of the kernel whose source is in a folder, and writes them into its package.

    The results are the reference's on float64, or on float32 where it converts to that; the header says which. The same
    examples give the same bytes.

    Raises:
        InvalidMetadataError, BuildError: It cannot be built, or declares no examples.

    Example:
        >>> from tpu_kernels.authoring import write_golden
        >>> write_golden("kernels_src/ragged-dot")  # doctest: +SKIP
        PosixPath('kernels_src/ragged-dot/torch-ext/ragged_dot/golden.safetensors')
    """
    source = Path(source).resolve()
    with tempfile.TemporaryDirectory(prefix="tpu-kernels-golden-") as folder:
        build(source, Path(folder, source.name))
        content = make_golden(get_local_kernel(Path(folder, source.name)))
    path = source / "torch-ext" / read_project(source).config.general.python_name / GOLDEN_FILE
    replace_file(path, content)
    return path


def make_golden(module: ModuleType) -> bytes:
    """The golden vectors of a loaded kernel.

    Raises:
        BuildError: It declares no examples.
    """
    from safetensors.torch import save

    examples = declared(module)
    if not examples:
        raise BuildError(f"{module.__name__} declares no examples: its cases.py has no function examples()")
    import torch

    tensors: dict[str, Any] = {}
    header = {}
    for example in examples:
        # Integers are compared exactly.
        dtype = example.dtype() if "int" in example.dtype() else "float32"
        for place, result in enumerate(example.expected()):
            tensors[f"{example.name}/{place}"] = torch.from_numpy(result.astype(dtype))
        header[example.name] = {
            "op": example.op.__name__,
            "arguments": dict(example.arguments),
            "static": dict(example.static),
            "digest": _digest(example),
            "tolerance": tolerance_of(example.dtype()),
            "precision": example.precision,
        }
    return bytes(save(tensors, {_HEADER: json.dumps(header, sort_keys=True)}))


def read_golden(module: ModuleType) -> bytes | None:
    """The golden vectors that came with a loaded kernel, as they were verified; None where none did."""
    try:
        return pkgutil.get_data(module.__name__, GOLDEN_FILE)
    except FileNotFoundError:
        return None


def run_golden(module: ModuleType, device: str) -> Iterator[Vector]:
    """Runs the golden vectors of a loaded kernel on a device of torch, one after the other.

    Raises:
        DeviceError: The kernel brings none, or there is no such device.
    """
    import torch

    content = read_golden(module)
    if content is None:
        raise DeviceError(
            f"{module.__name__} brings no golden vectors; its author makes them with: tpu-kernels golden"
        )
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        raise DeviceError(f"there is no device {device!r} here: {error}") from error
    for example, entry, expected in _examples(module, content):
        if _digest(example) != entry["digest"]:
            yield Vector(example.name, None, "its arrays are not made here as they were for the vectors")
            continue
        try:
            result = example.op(**example.tensors(device), **example.static)
            results = [result] if isinstance(result, torch.Tensor) else list(result)
            found = [each.detach().cpu().double().numpy() for each in results]
        except Exception as error:  # noqa: BLE001  whatever the device does is the answer
            yield Vector(example.name, None, f"{type(error).__name__}: {error}")
            continue
        yield Vector(example.name, compare(found, expected, entry["tolerance"]))


def _examples(module: ModuleType, content: bytes) -> Iterator[tuple[Example, dict[str, Any], list[Any]]]:
    """The examples, with their part of the header and their results."""
    from safetensors.torch import load

    length = int.from_bytes(content[:8], "little")
    header = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][_HEADER])
    tensors = load(content)
    for name, entry in header.items():
        arguments = {
            argument: tuple(value) if _is_shape(value) else value
            for argument, value in entry["arguments"].items()
        }
        count = sum(key.rpartition("/")[0] == name for key in tensors)
        expected = [tensors[f"{name}/{place}"].double().numpy() for place in range(count)]
        yield Example(name, getattr(module, entry["op"]), arguments, entry["static"]), entry, expected


def _is_shape(value: Any) -> bool:
    """Whether it is a shape and a dtype, and not integers."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[1], str)


def _digest(example: Example) -> str:
    """Of an example's arrays."""
    digest = hashlib.sha256()
    for name, numbers in sorted(example.numbers.items()):
        digest.update(name.encode() + numbers.tobytes())
    return digest.hexdigest()
