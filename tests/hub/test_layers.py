"""What the layers of a kernel say about themselves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tpu_kernels.hub.layers import Layer, read_layers


def test_flags_are_read_where_they_are_said_and_inherited() -> None:
    sources = {
        "layers/__init__.py": b"from .norm import RMSNorm\n",
        "layers/norm.py": b"""
import torch

class _Base(torch.nn.Module):
    has_backward = False

class RMSNorm(_Base):
    can_torch_compile: bool = True

class Helper:
    has_backward = True
""",
        "other.py": b"class Silu(nn.Module): pass",
    }
    assert read_layers(sources) == [Layer("RMSNorm", has_backward=False, can_torch_compile=True)]


@given(st.binary())
def test_what_cannot_be_parsed_has_none(content: bytes) -> None:
    assert read_layers({"layers.py": content}) == []
