"""Which experts tokens go to: not known before a model runs, so drawn, and taken at its worst."""

from __future__ import annotations

from dataclasses import dataclass

_SEED = 0


@dataclass(frozen=True)
class Routing:
    """The choices of a step's tokens, as one chip sees them.

    Attributes:
        index: [T, k] experts, those of this chip from 0 on; other chips' are `local` and above.
        local: How many experts the chip has.
    """

    index: tuple[tuple[int, ...], ...]
    local: int

    @property
    def group_sizes(self) -> list[int]:
        """Pairs of a token and one of the chip's experts, for each of these."""
        sizes = [0] * self.local
        for experts in self.index:
            for expert in experts:
                if expert < self.local:
                    sizes[expert] += 1
        return sizes

    @property
    def active(self) -> int:
        """Experts of the chip that some token goes to."""
        return sum(size > 0 for size in self.group_sizes)


def expected_routing(tokens: int, top_k: int, experts: int, groups: int) -> Routing:
    """All experts equally likely, from a fixed seed; of `groups` chips the one with most to do, as all wait for it.

    Example:
        >>> expected_routing(64, 8, experts=128, groups=8).active
        16
    """
    import numpy as np

    draw = np.random.default_rng(_SEED).random((tokens, experts))
    index = np.argpartition(draw, top_k - 1, axis=1)[:, :top_k]
    local = experts // groups
    seen = [
        Routing(tuple(map(tuple, np.where(index // local == n, index % local, local).tolist())), local)
        for n in range(groups)
    ]
    return max(seen, key=lambda routing: (routing.active, sum(routing.group_sizes)))


def worst_routing(tokens: int, top_k: int, experts: int, groups: int) -> Routing:
    """Every token goes to as many of this chip's experts as it can, and together they go to all of them.

    Example:
        >>> worst_routing(1, 8, experts=128, groups=8).active
        8
    """
    local = experts // groups
    here = min(top_k, local)
    index = tuple(
        tuple((token * here + n) % local if n < here else local for n in range(top_k))
        for token in range(tokens)
    )
    return Routing(index, local)
