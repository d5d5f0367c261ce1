"""Interfaces of kernels: which changes break them."""

from __future__ import annotations

import pytest

from tpu_kernels.authoring.interface import broken_promises, read_interface
from tpu_kernels.hub.metadata import Metadata

METADATA = Metadata.model_construct(tpu=None)
FORMER = "def f(x, y=1, *, z, w=2): ..."


def compared(former: str, new: str) -> list[str]:
    interfaces = [
        read_interface({"__init__.py": b'from .a import f\n__all__ = ["f"]', "a.py": code.encode()}, METADATA)
        for code in (former, new)
    ]
    return broken_promises(*interfaces)


@pytest.mark.parametrize(
    "kept",
    [
        FORMER,
        "def f(x, y=3, *, z, w=2): ...",
        "def f(x, y=1, v=0, *, z, w=2, u=5): ...",
        "def f(x, y=1, *, w=2, z): ...",
        "def f(x=0, y=1, *, z=0, w=2): ...",
    ],
)
def test_more_is_no_harm(kept: str) -> None:
    assert compared(FORMER, kept) == []


@pytest.mark.parametrize(
    "broken",
    [
        "def f(x, *, z, w=2): ...",
        "def f(y, x=1, *, z, w=2): ...",
        "def f(x, y, *, z, w=2): ...",
        "def f(x, y=1, *, z, w): ...",
        "def f(x, y=1, *, w=2): ...",
        "def f(x, y=1, *, z, w=2, u): ...",
        "def f(v, x, y=1, *, z, w=2): ...",
    ],
)
def test_less_and_other_is(broken: str) -> None:
    [message] = compared(FORMER, broken)
    assert message.startswith("f(x, [y], z=, [w=]) became f(")


def test_layers_keep_what_they_say() -> None:
    def layers(code: str) -> dict[str, bytes]:
        return {"__init__.py": b"", "layers.py": code.encode()}

    former = layers("class Norm(Module):\n  has_backward = True\nclass Gate(Module): ...")
    new = layers("class Norm(Module):\n  has_backward = False")
    assert broken_promises(read_interface(former, METADATA), read_interface(new, METADATA)) == [
        "the layer Gate is gone",
        "the layer Norm has no has_backward any more",
    ]
