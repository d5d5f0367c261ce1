"""What the compiler said about a program: passed from the worker process, and kept in the cache, as JSON."""

from __future__ import annotations

import dataclasses
import json


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The raw result of one compile. All sizes are in bytes of HBM, of one device.

    Attributes:
        error: The compiler's message where it refused the program.
        seconds: What compiling took.
        hlo: The optimised program, scheduled, with layouts; the kernels' bodies left out.
        alias_bytes: How much of the outputs is in arguments' memory.
        flops, bytes_accessed: XLA's cost analysis; None where it counts nothing.
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

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """Raises ValueError where `text` is not what `to_json` writes."""
        values = json.loads(text)
        if not isinstance(values, dict) or values.keys() != {f.name for f in dataclasses.fields(cls)}:
            raise ValueError("not the outcome of a compile")
        return cls(**values)
