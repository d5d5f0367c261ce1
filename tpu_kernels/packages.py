"""Which versions of packages are installed."""

from __future__ import annotations

import importlib.metadata

_COMPUTING = ("torch", "torch-tpu", "jax", "libtpu", "transformers", "tpu-kernels")


def installed(distribution: str) -> str | None:
    """The version of a distribution, None where it is not installed.

    Example:
        >>> installed("no-such-distribution")
    """
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def computing_versions() -> dict[str, str | None]:
    """The versions that results depend on, by name with underscores; None of what is not installed."""
    return {name.replace("-", "_"): installed(name) for name in _COMPUTING}
