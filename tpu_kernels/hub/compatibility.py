"""Whether a build runs here: on this device, with the packages that are installed."""

from __future__ import annotations

from .. import device
from ..errors import IncompatibleKernelError
from .metadata import Metadata
from .requirements import unmet_requirements
from .variants import UNIVERSAL

# A kernel reaches the kernels it depends on through stock's get_kernel_dep, which came with this release.
_DEPENDING = {"kernels": ">=0.17"}


def check_compatible(subject: str, variant: str, metadata: Metadata, *, check_arch: bool = True) -> None:
    """Raises if a build does not run here; `subject` leads the message.

    Raises:
        IncompatibleKernelError: It is for other hardware or, if `check_arch` is set, for other TPUs than the
            one here, or it needs other packages.
    """
    if metadata.backend.type != "tpu" and variant != UNIVERSAL:
        raise IncompatibleKernelError(
            f"{subject} is built for {metadata.backend.type!r}, not for 'tpu'; "
            "load it with the kernels package"
        )
    tpu = metadata.tpu
    if check_arch and tpu and tpu.generations:
        here = device.current()
        if here.generation is not None and here.generation not in tpu.generations:
            raise IncompatibleKernelError(
                f"{subject} is made for {', '.join(tpu.generations)}, and the TPU here is a {here.generation}; "
                "check_arch=False loads it all the same"
            )
    requires = {**(_DEPENDING if metadata.kernel_depends else {}), **(tpu.requires if tpu else {})}
    unmet = unmet_requirements(requires)
    if unmet:
        # One command for all of them: installed one by one, they may undo each other.
        packages = [f"'{requirement.requirement}'" for requirement in unmet if requirement.is_package]
        command = f"; run: pip install {' '.join(packages)}" if packages else ""
        raise IncompatibleKernelError(f"{subject} {' and '.join(map(str, unmet))}{command}")
