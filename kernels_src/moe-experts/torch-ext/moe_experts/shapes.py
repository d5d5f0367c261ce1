"""What one kernel is made for, and how it divides its work."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from .ragged_dot.quantised import BLOCK as MXFP4_BLOCK
from .ragged_dot.quantised import packed_depth
from .ragged_dot.tiles import LANES, round_up

# Columns that one product takes: longer ones are unrolled into more code for little.
BLOCK = 2048


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a kernel is made for.

    Attributes:
      tokens, choices, experts, hidden, intermediate: T, k, E, H, I.
      gate_up_columns: U, 2I or without a gate I.
      dtype: of biases, tokens and result.
      weight_dtype: of weights; int8 with a scale for each column of a product, int32 for MXFP4's words, else `dtype`.
      routing_dtype: of the routing weights.
      biased: the experts have biases.
      choices_first: ids and routing weights come as [k, T].
      gate_up_contraction_first: gate_up comes as [E, H, U], not [E, U, H].
      down_contraction_first: down comes as [E, I, H], not [E, H, I].
      interleaved: gate and up columns alternate.
      shared: there is one more expert, with operands of its own, that all tokens have.
    """

    tokens: int
    choices: int
    experts: int
    hidden: int
    intermediate: int
    gate_up_columns: int
    dtype: Any
    weight_dtype: Any
    routing_dtype: Any
    biased: bool
    choices_first: bool
    gate_up_contraction_first: bool
    down_contraction_first: bool
    interleaved: bool = False
    shared: bool = False

    @property
    def all_experts(self) -> int:
        """With the shared one, whose number is E."""
        return self.experts + self.shared

    @property
    def halves(self) -> bool:
        """Whether a column of gate meets its column of up only when all of the first product is there."""
        return self.gate_up_columns != self.intermediate and not self.interleaved

    @property
    def vectors(self) -> tuple[str, ...]:
        """What experts have beside their weights, by name: a number for each column of a product."""
        kinds = (
            *(("bias",) if self.biased else ()),
            *(("scale",) if self.weight_dtype == jnp.int8 else ()),
        )
        return tuple(f"{product}_{kind}" for kind in kinds for product in ("gate_up", "down"))

    @property
    def mxfp4(self) -> bool:
        """Whether weights are MXFP4, with exponents beside them: `ragged_dot.quantised`."""
        return bool(self.weight_dtype == jnp.int32)

    @property
    def weight_bits(self) -> float:
        """Of a weight in HBM."""
        return 4 + 8 / MXFP4_BLOCK if self.mxfp4 else 8 * jnp.dtype(self.weight_dtype).itemsize

    def contraction(self, length: int) -> int:
        """The length of a product's contraction in vector memory."""
        return packed_depth(length) if self.mxfp4 else length


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel divides its work.

    Attributes:
      gate_up_piece: of the U columns of the first product, those whose weights one DMA brings; a multiple of 256, or U.
      down_piece: of the H columns of the second product, those whose weights one DMA brings; a multiple of 128, or H.
      gate_up_slots, down_slots: pieces that are in vector memory or on their way.
      rows: of a tile of gathered tokens, a multiple of 16, at most 128; 0: dense.
      vmem_bytes: vector memory the kernel may use.
    """

    gate_up_piece: int
    down_piece: int
    gate_up_slots: int
    down_slots: int
    rows: int
    vmem_bytes: int

    def columns(self, tokens: int) -> int:
        """C: the tokens, rounded up to whole registers; where they are gathered, to whole ones of lanes."""
        return round_up(tokens, LANES if self.rows else 16)
