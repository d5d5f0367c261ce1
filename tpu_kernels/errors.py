"""The one exception family of tpu-kernels.

Every error this package raises on purpose derives from `TpuKernelsError`, so ``except TpuKernelsError``
catches them all. Each message names the value that was refused, the limit it broke and the way out.
"""

from __future__ import annotations

from collections.abc import Sequence


class TpuKernelsError(Exception):
    """Base of every error that tpu-kernels raises on purpose."""


class InvalidReferenceError(TpuKernelsError, ValueError):
    """A kernel was named in a way that cannot be read, e.g. without an organisation."""


class KernelNotFoundError(TpuKernelsError, LookupError):
    """No source has the kernel, or not in the version that was asked for."""


class InvalidMetadataError(TpuKernelsError, ValueError):
    """A kernel's `metadata.json`, `build.toml` or a registry index is malformed."""


class LockError(TpuKernelsError, ValueError):
    """A lock is missing or malformed, or does not hold a kernel that it should."""


class VerificationError(TpuKernelsError):
    """A kernel's files are not the ones its digests promise. Nothing of it was run.

    `violations` names each file that is missing, changed or not listed.
    """

    def __init__(self, message: str, violations: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.violations = tuple(violations)


class UntrustedKernelError(TpuKernelsError):
    """A kernel's publisher is not trusted. Nothing of it was downloaded or run."""


class SourceUnavailableError(TpuKernelsError, ConnectionError):
    """The Hub or a bucket cannot be reached, or refuses, and the cache has no copy."""


class CopyError(TpuKernelsError):
    """A kernel could not be written to a folder or a mirror. What was there before still is."""


class ConfigurationError(TpuKernelsError, ValueError):
    """A setting, such as an environment variable, cannot be read."""


class IncompatibleKernelError(TpuKernelsError):
    """The kernel exists but does not run on this device or with these versions."""


class BuildError(TpuKernelsError):
    """A kernel could not be built from its source."""


class PublishError(TpuKernelsError):
    """A kernel may not be published as it is, or could not be. What was published before still is."""


class EmulationError(TpuKernelsError, RuntimeError):
    """The emulated device could not be set up in this process."""


class DeviceError(TpuKernelsError, RuntimeError):
    """A device was asked for that is not there, or what was asked for does not fit on it."""


class IntegrationError(TpuKernelsError):
    """A kernel could not be registered with another library."""


class GenerationError(TpuKernelsError, ValueError):
    """Tokens were asked for that cannot be made so: a prompt does not fit the cache, or not this cache."""


class BenchmarkError(TpuKernelsError, ValueError):
    """A benchmark was asked for with values it cannot run."""


class AnalysisError(TpuKernelsError, RuntimeError):
    """The TPU compiler cannot be run here, or was asked for a target that does not exist."""


class SimulationError(AnalysisError):
    """A kernel cannot be simulated: its control flow is not known, or it waits for what never comes."""


class ProjectionError(AnalysisError):
    """A model's decode step cannot be projected, or cannot be split over chips as asked."""


class LaunchError(TpuKernelsError, RuntimeError):
    """A program cannot be run as several ranks, or one of them failed."""


class TuningError(TpuKernelsError, RuntimeError):
    """A kernel cannot be tuned, or not here."""


class DashboardError(TpuKernelsError, ValueError):
    """What a dashboard is to be made of cannot be read."""


_LONGEST_MESSAGE = 300


def first_line(error: BaseException) -> str:
    """An error in one line that fits a table; this package's own messages are complete without their type."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    if not isinstance(error, TpuKernelsError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 1] + "…"
