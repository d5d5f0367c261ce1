"""One page that shows what works, how fast, and where.

    collect  the real compiler and the simulator, and reports of other commands -> Facts
    facts    what is known, as data; kept beside the page, so that the next one shows the trend
    page     Facts -> one self-contained HTML file

Importing this package loads neither torch nor jax.
"""

from __future__ import annotations

from .collect import collect, read_checks, read_decode, read_peers
from .facts import Facts, KernelFacts, ModelFacts, PeerFacts, Run
from .page import render

__all__ = [
    "Facts",
    "KernelFacts",
    "ModelFacts",
    "PeerFacts",
    "Run",
    "collect",
    "read_checks",
    "read_decode",
    "read_peers",
    "render",
]
