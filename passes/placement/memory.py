"""Memory of a stage, as a limit on what a partition may put on a rank.

stage of blocks 3, 4, 5, two micro-batches in flight      held 3 + 4 + 5
                                                        + 2 x activations of 3 + 4 + 5   <= limit of its rank
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
ROUNDING = 1e-12  # relative; what a limit of memory may be exceeded by, less than a byte


@dataclass(frozen=True)
class StageMemory:
    """What blocks hold, how often, and what a rank has room for.

    A rank that owns two stages, as in a wave, holds both. The first stage of 2N keeps its activations longest.
    """

    held_bytes: Sequence[float]  # per block, once: weights, gradients, optimizer states
    activation_bytes: Sequence[float]  # per block and micro-batch in flight
    in_flight: Sequence[float]  # per stage, the most micro-batches between its forward and its backward
    limit_bytes: Sequence[float]  # per rank: what is left for stages

    def before(self) -> Floats:
        """Bytes of every stage if it had all blocks before each position: [stages, blocks + 1]."""
        count = np.asarray(self.in_flight, dtype=float)[:, None]
        return prefix(self.held_bytes) + count * prefix(self.activation_bytes)

    def levels(self, rank_of: Sequence[int]) -> "LevelMemory":
        """For levels on these ranks: level d owns stages d and 2 * levels - 1 - d; those of a rank share its limit."""
        before, ranks = self.before(), list(rank_of)
        limits = np.asarray(self.limit_bytes, dtype=float)[ranks] / np.bincount(ranks)[ranks]
        return LevelMemory(before[: len(ranks)], before[: len(ranks) - 1 : -1], limits)


@dataclass(frozen=True)
class LevelMemory:
    """Bytes of the blocks before each position, on either side of a level: [levels, blocks + 1]; limits [levels]."""

    left: Floats
    right: Floats
    limits: Floats


def prefix(amounts: Sequence[float]) -> Floats:
    """Sums of the amounts before each position, one more than amounts."""
    return np.concatenate([[0.0], np.cumsum(np.asarray(amounts, dtype=float))])
