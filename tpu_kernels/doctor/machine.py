"""The TPU, who uses it, and what libraries do to it. No TPU is opened."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from .. import device
from ..packages import installed
from .finding import Finding

_SECTION = "machine"
_NODES = re.compile(r"/dev/(?:vfio/\d+|accel\d+)")
_PROCESSES = Path("/proc")


def examine() -> Iterator[Finding]:
    """The device of this process, its users, and traps of this kind of machine."""
    here = device.current()
    yield _device(here)
    if here.kind == "tpu":
        yield from _users()
        yield _allocator()
    yield _jax(here)
    yield from _metadata_server(here)


def _device(here: device.Device) -> Finding:
    if here.kind == "cpu":
        if installed("torch-tpu") is None:
            return Finding(_SECTION, "ok", "TPU", "none that can be told without torch_tpu")
        message = "none: kernels run their reference path on the CPU; tpu-kernels emulate runs them emulated"
        return Finding(_SECTION, "ok", "TPU", message)
    if here.kind == "tpu" and here.generation is None:
        remedy = "upgrade tpu-kernels and torch-tpu; kernels choose their tiles by the generation"
        return Finding(_SECTION, "warning", "TPU", here.describe(), remedy)
    return Finding(_SECTION, "ok", "TPU", here.describe())


def _users() -> Iterator[Finding]:
    users = sorted(set(_holders()))
    if users:
        names = ", ".join(f"{name} (process {pid})" for pid, name in users)
        remedy = "a chip serves one process; end the other one before a program here opens it"
        yield Finding(_SECTION, "warning", "TPU users", f"open in {names}", remedy)
    else:
        yield Finding(_SECTION, "ok", "TPU users", "none that this user may see")


def _holders() -> Iterator[tuple[int, str]]:
    """Processes that have a chip open, as far as this user may look."""
    for process in _PROCESSES.glob("[0-9]*"):
        # Processes end meanwhile, and those of others are closed.
        with contextlib.suppress(OSError):
            for file in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if _NODES.fullmatch(str(file.readlink())):
                        yield int(process.name), (process / "comm").read_text().strip()


def _allocator() -> Finding:
    with contextlib.suppress(OSError):
        if not re.search(r"\blibtcmalloc[._-]", (_PROCESSES / "self" / "maps").read_text()):
            message = "is not loaded; eager dispatch of torch_tpu is slower with the allocator of glibc"
            remedy = (
                "start Python with LD_PRELOAD=libtcmalloc_minimal.so.4 (of the package libtcmalloc-minimal4)"
            )
            return Finding(_SECTION, "warning", "tcmalloc", message, remedy)
    return Finding(_SECTION, "ok", "tcmalloc", "is loaded")


def _jax(here: device.Device) -> Finding:
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if here.kind == "tpu" and platforms not in ("", "cpu"):
        message = f"JAX_PLATFORMS={platforms} lets JAX open the chips, and then torch cannot"
        return Finding(_SECTION, "warning", "jax", message, "unset JAX_PLATFORMS, or set it to cpu")
    if platforms == "cpu":
        return Finding(_SECTION, "ok", "jax", "is kept off the TPU (JAX_PLATFORMS=cpu)")
    message = "is kept off the TPU as soon as a kernel is used; what computes with JAX before that opens it"
    return Finding(_SECTION, "ok", "jax", message if here.kind == "tpu" else "finds no TPU to open")


def _metadata_server(here: device.Device) -> Iterator[Finding]:
    if here.kind != "tpu" and installed("libtpu") is not None and not os.environ.get("TPU_SKIP_MDS_QUERY"):
        yield Finding(
            _SECTION,
            "warning",
            "libtpu",
            "looks for a TPU on the network where there is none here: the first backward() waits for minutes",
            "export TPU_SKIP_MDS_QUERY=1",
        )
