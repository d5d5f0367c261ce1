"""What the compiler said about a program: passed from the worker process, and kept in the cache, as JSON."""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The raw result of one compile. All sizes are in bytes of HBM, of one device.

    Attributes:
        error: The compiler's message where it refused the program.
        seconds: What compiling took.
        hlo: The optimised program, scheduled, with layouts; the kernels' bodies left out.
        alias_bytes: How much of the outputs is in arguments' memory.
        flops, bytes_accessed: XLA's cost analysis; None where it counts nothing.
        bundles: The final schedule of each kernel (or of each op, where that was asked for) as the compiler prints
            it, packed (`pack`), by the name of its instruction in `hlo`.
        utilization: What each of its bundles uses of the core's units, likewise.
    """

    error: str | None = None
    seconds: float = 0.0
    hlo: str = ""
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temporary_bytes: int = 0
    code_bytes: int = 0
    flops: float | None = None
    bytes_accessed: float | None = None
    bundles: dict[str, str] = dataclasses.field(default_factory=dict)
    utilization: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """Raises ValueError where `text` is not what `to_json` writes."""
        values = json.loads(text)
        if not isinstance(values, dict) or values.keys() != {f.name for f in dataclasses.fields(cls)}:
            raise ValueError("not the outcome of a compile")
        return cls(**values)


def pack(text: str) -> str:
    """`text`, compressed, as text that JSON takes."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode("ascii")


def unpack(packed: str) -> str:
    """The text that was packed.

    Raises:
        ValueError: It was not.
    """
    try:
        return zlib.decompress(base64.b64decode(packed, validate=True)).decode()
    except zlib.error as error:
        raise ValueError("not a packed text") from error
