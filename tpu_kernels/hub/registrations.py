"""Watches which torch ops a kernel registers while it is imported, so that none takes another's place.

A kernel names its ops after its own id, and then versions never meet. One that registers an op under a fixed
name would, in its second version, silently change what the first computes: `torch.library.custom_op` replaces
an op that is there. Here that is an error, before it happens, and the second version is not loaded.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ..errors import IncompatibleKernelError


@dataclass
class _Watch:
    """The registrations of one kernel so far: the ops, the libraries they are in, and the first clash."""

    kernel_id: str
    ops: set[str] = field(default_factory=set)
    libraries: list[Any] = field(default_factory=list)
    clash: IncompatibleKernelError | None = None

    def check(self, op: str, *, is_taken: bool) -> None:
        # What it left in its own namespace when it failed before is no other's.
        is_own = op in self.ops or op.partition("::")[0] == self.kernel_id
        if is_taken and not is_own:
            owner = _owners.get(op)
            by = f"the kernel with the id {owner!r}" if owner else "something else in this process"
            self.clash = IncompatibleKernelError(
                f"the kernel with the id {self.kernel_id!r} registers the torch op {op}, which {by} has "
                "registered already; loading it would change what that computes. Load it in another process, or "
                "build it with ops named after its id: "
                f"{self.kernel_id}::{op.partition('::')[2]}"
            )
            raise self.clash


# The kernel that registered an op, by the op's qualified name.
_owners: dict[str, str] = {}
_watch: ContextVar[_Watch | None] = ContextVar("_watch", default=None)
_patching = threading.Lock()
_patches = 0


@contextlib.contextmanager
def watched(kernel_id: str) -> Iterator[None]:
    """Refuses, in this block, registrations of ops that exist already, and undoes all of it if it fails.

    Only what this thread registers is watched. Where torch is not imported yet there are no ops to protect.

    Raises:
        IncompatibleKernelError: The kernel registers an op that exists, even if it hides the error.
    """
    if "torch" not in sys.modules:
        yield
        return
    watch = _Watch(kernel_id)
    token = _watch.set(watch)
    try:
        with _patched():
            yield
        if watch.clash is not None:
            raise watch.clash
    except BaseException:
        _undo(watch)
        raise
    finally:
        _watch.reset(token)
    _owners.update(dict.fromkeys(watch.ops, kernel_id))


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    """Puts the watch before the four ways in which Python code registers and replaces ops."""
    global _patches
    from torch._library import custom_ops
    from torch.library import Library

    with _patching:
        _patches += 1
        if _patches == 1:
            _originals.update(
                {
                    (Library, "define"): Library.define,
                    (Library, "impl"): Library.impl,
                    (Library, "_register_fake"): Library._register_fake,
                    (custom_ops, "get_library_allowing_overwrite"): custom_ops.get_library_allowing_overwrite,
                }
            )
            for (owner, name), original in _originals.items():
                setattr(owner, name, _WRAPPERS[name](original))
    try:
        yield
    finally:
        with _patching:
            _patches -= 1
            if _patches == 0:
                for (owner, name), original in _originals.items():
                    setattr(owner, name, original)


_originals: dict[tuple[Any, str], Callable[..., Any]] = {}


def _watch_definitions(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def define(library: Any, schema: str, *args: Any, **kwargs: Any) -> Any:
        if (watch := _watch.get()) is not None:
            op = f"{library.ns}::{schema.partition('(')[0]}"
            watch.check(op, is_taken=_exists(op))
            watch.libraries.append(library)
            watch.ops.add(op)
        return original(library, schema, *args, **kwargs)

    return define


def _watch_implementations(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def implement(library: Any, op_name: Any, *args: Any, **kwargs: Any) -> Any:
        if (watch := _watch.get()) is not None:
            name = op_name if isinstance(op_name, str) else op_name._schema.name
            op = f"{library.ns}::{name.rpartition('::')[2]}"
            # An implementation of torch's own op for a device of its own is how libraries extend torch.
            watch.check(op, is_taken=op in _owners)
            watch.libraries.append(library)
        return original(library, op_name, *args, **kwargs)

    return implement


def _watch_replacements(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replace(namespace: str, name: str) -> Any:
        if (watch := _watch.get()) is not None:
            op = f"{namespace}::{name}"
            watch.check(op, is_taken=_exists(op))
        return original(namespace, name)

    return replace


_WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "define": _watch_definitions,
    "impl": _watch_implementations,
    "_register_fake": _watch_implementations,
    "get_library_allowing_overwrite": _watch_replacements,
}


def _exists(op: str) -> bool:
    import torch

    return bool(torch._C._dispatch_has_kernel(op))


def _undo(watch: _Watch) -> None:
    """Takes back what a kernel registered before it failed, so that it can be tried again."""
    from torch import library
    from torch._library import custom_ops

    for registered in watch.libraries:
        registered._destroy()
    library._defs -= watch.ops
    for op in watch.ops:
        custom_ops.OPDEF_TO_LIB.pop(op, None)
