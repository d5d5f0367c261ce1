"""Numbers of bytes, for people and from the compiler's messages. All units are powers of 1024."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# How the compiler abbreviates them: `128.00M`, `64.0K`, `512B` or just `512`.
_COMPILER_UNITS = {"": 0, "B": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def format_bytes(count: int) -> str:
    """`count` bytes in the largest unit that leaves at least one.

    Example:
        >>> format_bytes(31719424)
        '30.2 MiB'
        >>> format_bytes(512)
        '512 B'
    """
    power = 0
    while count >= 1024 ** (power + 1) and power < len(_UNITS) - 1:
        power += 1
    return f"{count} B" if power == 0 else f"{count / 1024**power:.1f} {_UNITS[power]}"


def parse_bytes(text: str) -> int:
    """Reads a size as the compiler prints it, which is rounded.

    Example:
        >>> parse_bytes("127.94M")
        134154813
    """
    number = text.rstrip("BKMGT")
    unit: int = 1024 ** _COMPILER_UNITS[text[len(number) :]]
    return round(float(number) * unit)
