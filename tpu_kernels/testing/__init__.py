"""Tools for testing code that loads kernels: a Hub on this machine, and faults to switch on in it.

Importing this package loads neither torch, jax nor huggingface_hub.
"""

from __future__ import annotations

from .fake_hub import FakeHub, Fault, Request

__all__ = ["FakeHub", "Fault", "Request"]
