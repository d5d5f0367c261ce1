"""Times of TPU kernels from the compiler's final schedule.

One module a stage; what each hands on is in brackets::

    parser     the compiler's text -> [ir.Schedule]
    blocks     -> basic blocks of what matters for control and DMA [Block]
    executor   with codegen, and the integers that operands found: the way through the kernel [trace.Trace]
    replay     with the models of DMA and matrix units and a calibration: times [Timing]
    simulation all kernels of a function: [profile.Profile]
"""

from __future__ import annotations

from .profile import Profile
from .simulation import simulate, simulate_many

__all__ = ["Profile", "simulate", "simulate_many"]
